"""The baselines that go through `torch.distributed.checkpoint`: save under one layout, load under another."""

import dataclasses
import multiprocessing
import os
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from reshard_workers import PRELOADED, values
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nereus.boxes import shards
from nereus.plan import ModelStage, StagePlan
from nereus.transition.orders import StageKinds

States = dict[ModelStage, StageKinds]


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a transition: the same plan for every model-stage."""

    states: States
    plan: StagePlan


def tensors(side: Side, rank: int, *, filled: bool) -> dict[str, DTensor]:
    """The rank's shards as DTensors over its pipeline stage; every rank of the world calls it, for the groups."""
    layout = side.plan.layout
    meshes = {}
    for pp_rank in range(layout.pp):
        members = [
            [unit[layout.rank(tp_rank=t, pp_rank=pp_rank)] for t in range(layout.tp)] for unit in side.plan.units
        ]
        meshes[pp_rank] = DeviceMesh("cpu", members, mesh_dim_names=("dp", "tp"))
    position = side.plan.position(rank)
    found: dict[str, DTensor] = {}
    if position is None:
        return found
    mesh = meshes[layout.pp_rank(position[1])]
    for stage, state in side.states.items():
        for shard in shards(state.spec, layout, position[1]):
            placement = Replicate() if shard.param.dim is None else Shard(shard.param.dim)
            for kind, dtype in state.kinds:
                local = values(shard.param, shard.box, dtype) if filled else torch.ones(shard.box.shape, dtype=dtype)
                found[f"{stage}/{kind}/{shard.param.name}"] = DTensor.from_local(
                    local, mesh, (Replicate(), placement), run_check=False,
                    shape=torch.Size(shard.param.shape), stride=torch.empty(shard.param.shape, device="meta").stride(),
                )  # fmt: skip
    return found


def check(side: Side, rank: int, loaded: dict[str, DTensor]) -> bool:
    """Whether the rank holds what it should."""
    position = side.plan.position(rank)
    if position is None:
        return True
    return all(
        torch.equal(loaded[f"{stage}/{kind}/{shard.param.name}"].to_local(), values(shard.param, shard.box, dtype))
        for stage, state in side.states.items()
        for shard in shards(state.spec, side.plan.layout, position[1])
        for kind, dtype in state.kinds
    )


def rank_main(pipe: Connection, rank: int, world: int, meeting: str, saves: Side | None, loads: Side | None) -> None:
    """Join, build what is to be saved, then save and load when told."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    saved = tensors(saves, rank, filled=True) if saves else {}
    pipe.send("ready")
    folder = pipe.recv()
    if saves:
        dcp.save(saved, checkpoint_id=folder)
        pipe.send("saved")
    if loads:
        loaded = tensors(loads, rank, filled=False)
        dcp.load(loaded, checkpoint_id=folder)
        pipe.send("loaded")
        pipe.send(check(loads, rank, loaded))
    pipe.recv()
    dist.destroy_process_group()


class World:
    """Processes of one torch.distributed world."""

    def __init__(
        self, world: int, folder: str, *, saves: Side | None, loads: Side | None, restarted: bool = False
    ) -> None:
        """restarted: the processes start from nothing, as a restart does, rather than from one that has torch."""
        context: Any = multiprocessing.get_context("spawn" if restarted else "forkserver")
        if not restarted:
            context.set_forkserver_preload(PRELOADED)
        meeting = os.path.join(folder, f"meeting-{time.monotonic_ns()}")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs, rank, world, meeting, saves, loads), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, message: str) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def hear(self, timeout_s: float = 240) -> list[Any]:
        """One message of every rank."""
        for pipe in self.pipes:
            if not pipe.poll(timeout_s):
                raise TimeoutError("a rank of the checkpoint baseline did not answer")
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        self.tell("end")
        for process in self.processes:
            process.join()


def checkpoint_and_restart(states: States, source: StagePlan, target: StagePlan) -> float:
    """Seconds to save, end the processes, start new ones and load under the new layout."""
    with tempfile.TemporaryDirectory() as folder:
        old = World(len(source.devices), folder, saves=Side(states, source), loads=None)
        old.hear()
        begun = time.perf_counter()
        old.tell(str(Path(folder) / "checkpoint"))
        old.hear()
        old.end()
        new = World(len(target.devices), folder, saves=None, loads=Side(states, target), restarted=True)
        new.hear()
        new.tell(str(Path(folder) / "checkpoint"))
        new.hear()
        seconds = time.perf_counter() - begun
        assert all(new.hear()), "the checkpoint baseline loaded wrong values"
        new.end()
    return seconds


def checkpoint_in_place(states: States, source: StagePlan, target: StagePlan) -> float:
    """Seconds to save and load under the new layout with processes that stay."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            max(*source.devices, *target.devices) + 1, folder, saves=Side(states, source), loads=Side(states, target)
        )
        world.hear()
        begun = time.perf_counter()
        world.tell(str(Path(folder) / "checkpoint"))
        world.hear()
        world.hear()
        seconds = time.perf_counter() - begun
        assert all(world.hear()), "the checkpoint baseline loaded wrong values"
        world.end()
    return seconds
