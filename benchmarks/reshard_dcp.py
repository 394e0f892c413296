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
from reshard_workers import PRELOADED, values
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nereus.moving.commands import StageKinds
from nereus.plan import ModelStage, StagePlan
from nereus.shards.boxes import shards

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
            known = values(shard.param, shard.box, torch.float32) if filled else torch.empty(0)
            for kind, dtype in state.kinds:
                local = known.to(dtype, copy=True) if filled else torch.ones(shard.box.shape, dtype=dtype)
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


def rank_main(pipe: Connection, rank: int, world: int, meeting: str) -> None:
    """Join, then build, save, load and check as told."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    pipe.send("joined")
    held: dict[str, DTensor] = {}
    while (request := pipe.recv()) != "end":
        what, argument = request
        if what == "build":
            side, filled = argument
            held = tensors(side, rank, filled=filled)
        elif what == "save":
            save(held, checkpoint_id=argument)
        elif what == "load":
            load(held, checkpoint_id=argument)
        elif not check(argument, rank, held):
            raise ValueError(f"rank {rank} loaded wrong values")
        pipe.send(what)
    dist.destroy_process_group()


class World:
    """Processes of one torch.distributed world."""

    def __init__(self, world: int, folder: str, *, restarted: bool = False) -> None:
        """restarted: the processes start from nothing, as a restart does, rather than from one that has torch."""
        context: Any = multiprocessing.get_context("spawn" if restarted else "forkserver")
        if not restarted:
            context.set_forkserver_preload(PRELOADED)
        meeting = os.path.join(folder, f"meeting-{time.monotonic_ns()}")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs, rank, world, meeting), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

        self._hear()

    def do(self, what: str, argument: object) -> None:
        """Every rank builds (a side, filled or not), saves, loads (a folder) or checks (a side)."""
        for pipe in self.pipes:
            pipe.send((what, argument))
        self._hear()

    def _hear(self, timeout_s: float = 240) -> None:
        for pipe in self.pipes:
            if not pipe.poll(timeout_s):
                raise TimeoutError("a rank of the checkpoint baseline did not answer")
            pipe.recv()

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send("end")
        for process in self.processes:
            process.join()


def checkpoint_and_restart(states: States, source: StagePlan, target: StagePlan) -> float:
    """Seconds to save, end the processes, start new ones and load under the new layout."""
    with tempfile.TemporaryDirectory() as folder:
        saves, loads, checkpoint = Side(states, source), Side(states, target), str(Path(folder) / "checkpoint")
        old = World(len(source.devices), folder)
        old.do("build", (saves, True))
        begun = time.perf_counter()
        old.do("save", checkpoint)
        old.end()
        new = World(len(target.devices), folder, restarted=True)
        new.do("build", (loads, False))
        new.do("load", checkpoint)
        seconds = time.perf_counter() - begun
        new.do("check", loads)
        new.end()
    return seconds


class CheckpointInPlace:
    """Saves under one layout and loads under another with processes that stay, for every case the same."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._world = World(world, self._folder.name)

    def seconds(self, states: States, source: StagePlan, target: StagePlan) -> float:
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            self._world.do("build", (Side(states, source), True))
            begun = time.perf_counter()
            self._world.do("save", folder)
            saved_s = time.perf_counter() - begun
            self._world.do("build", (Side(states, target), False))
            begun = time.perf_counter()
            self._world.do("load", folder)
            loaded_s = time.perf_counter() - begun
            self._world.do("check", Side(states, target))
        self._world.do("build", (Side({}, target), False))
        return saved_s + loaded_s

    def close(self) -> None:
        self._world.end()
        self._folder.cleanup()
