"""What a joined Ray cluster says of its nodes, on a real one whose nodes join and drain."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runs import Run, nereus, tiny
from supply_contract import check_view

from nereus.errors import ClusterError
from nereus.launch.build import follows_cluster, ray_settings
from nereus.plan import Plan
from nereus.recipe.config import RunConfig, parse_config
from nereus.runtime.ray_pool import RayPool, RaySettings, RaySupply
from nereus.supply.slots import DRAIN_MARGIN_S
from nereus.supply.supply import SupplyView

KEEPER = """
import sys, time, ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(cluster.add_node(num_cpus=2).node_id, cluster.address, flush=True)
for line in sys.stdin:
    command, *words = line.split()
    if command == "join":
        print(cluster.add_node(num_cpus=2).node_id, flush=True)
    else:
        deadline_ms = int((time.time() + float(words[1])) * 1000)
        preempted = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = ray._raylet.GcsClient(address=cluster.address)
        print(*client.drain_node(words[0], preempted, "for a test", deadline_ms), flush=True)
cluster.shutdown()
"""
"""Keeps a cluster of two nodes with two slots each; adds or drains one at a line's command."""


@dataclasses.dataclass
class Keeper:
    """second: the id of the second node."""

    process: subprocess.Popen[str]
    second: str = ""
    address: str = ""

    def __post_init__(self) -> None:
        self.second, self.address = self._answer().split()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Keeper(process)
        assert process.stdin is not None
        process.stdin.close()


def once(supply: RaySupply, wanted: Callable[[SupplyView], bool], *, patience_s: float = 30.0) -> SupplyView:
    """The first view that is as wanted."""
    deadline = time.monotonic() + patience_s
    while not wanted(view := supply.at(0.0)):
        check_view(view)
        assert time.monotonic() < deadline, view
        time.sleep(0.1)
    check_view(view)
    return view


@pytest.mark.slow
def test_nodes_that_join_drain_and_go_are_seen_and_workers_start_where_they_joined(keeper: Keeper) -> None:
    settings = RaySettings(6, timedelta(seconds=30), address=keeper.address, min_workers=3)
    pool = RayPool(settings)
    supply = RaySupply(pool)
    try:
        pool.connect()
        assert supply.at(0.0) == SupplyView((0, 1, 2, 3))
        assert pool.cluster.device_ids == tuple(range(6)) and len(pool.cluster.nodes) == 3
        with pytest.raises(ClusterError, match="device 4 has no node that takes a worker"):
            pool.start([4])
        second_has = [device.id for device in pool.cluster.devices if keeper.second[:6] in device.node]
        leaving, staying = ((2, 3), (0, 1)) if 2 in second_has else ((0, 1), (2, 3))
        pool.start([*staying, leaving[0]])

        third = keeper.ask("join")
        assert once(supply, lambda view: len(view.devices) == 6) == SupplyView((0, 1, 2, 3, 4, 5))
        assert all(third[:6] in pool.cluster.device(device).node for device in (4, 5))
        pool.start([4])
        assert pool.devices == tuple(sorted((*staying, leaving[0], 4)))

        assert keeper.ask(f"drain {keeper.second} 60").startswith("True")
        view = once(supply, lambda view: bool(view.announced))
        assert view.devices == tuple(sorted((*staying, leaving[0], 4, 5))), "no worker starts there any more"
        (announced,) = view.announced
        assert (
            announced.devices == leaving[:1] and announced.leaving and 40 < announced.deadline_s <= 60 - DRAIN_MARGIN_S
        )
        assert supply.at(1.0).announced[0].deadline_s < announced.deadline_s

        pool.stop(leaving[:1])
        assert supply.at(2.0) == SupplyView(tuple(sorted((*staying, 4, 5)))), "what was left is not entered again"
        keeper.ask("join")
        assert once(supply, lambda view: len(view.devices) == 6).announced == ()
        assert keeper.second[:6] not in "".join(pool.cluster.nodes), "its ids are the new node's"
        pool.start(leaving)
        assert pool.devices == tuple(sorted((*staying, *leaving, 4)))
    finally:
        pool.close()


@pytest.mark.slow
def test_what_the_start_needs_must_be_there_and_a_node_that_drains_does_not_count(keeper: Keeper) -> None:
    assert keeper.ask(f"drain {keeper.second} 60").startswith("True")
    pool = RayPool(RaySettings(6, timedelta(seconds=30), address=keeper.address, min_workers=3))
    try:
        with pytest.raises(ClusterError, match=r"workers: 3 devices are needed, 2 CPU slots are available \([\d.]+: 2"):
            pool.connect()
    finally:
        pool.close()


def awaited(run: Run, folder: Path, type_: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first such event of a run once it is written, within a minute."""
    deadline = time.monotonic() + 60
    while True:
        lines = (folder / "run" / "events.jsonl").read_text().split("\n")[:-1]
        for event in map(json.loads, lines):
            if event["type"] == type_ and wanted(event):
                return dict(event)
        assert time.monotonic() < deadline and run.process.poll() is None, run.output
        time.sleep(0.05)


@pytest.mark.slow
def test_a_job_leaves_a_node_that_drains_by_a_live_move_and_sees_one_that_joins(tmp_path: Path, keeper: Keeper) -> None:
    """Both nodes hold trained state when one is drained."""
    plan = "plan={actor-generation: d4t1p1@0-3, reference-inference: d1t1p1@0, actor-training: d2t1p2@0-3, "
    plan += "critic-training: d1t1p2@2-3, critic-inference: d1t1p2@2-3}"
    arguments = tiny(tmp_path, f"cluster.address={keeper.address}", "cluster.workers=6", "adapt=true",
                     "trainer.steps=1000", "trainer.critic_warmup=0", plan, recipe="quickstart")  # fmt: skip
    run, asking = Run(["train", *arguments], log=tmp_path / "output.txt"), tmp_path / "asking"
    asking.mkdir()
    try:
        run.wait_for("step 2:", timeout_s=120)
        assert keeper.ask(f"drain {keeper.second} 20").startswith("True")
        drained_s = time.monotonic()
        announced = awaited(run, tmp_path, "supply", lambda event: bool(event["announced"]))["announced"][0]
        leaving = set(announced["devices"])
        left = awaited(run, tmp_path, "supply", lambda event: not leaving & set(event["devices"]))
        assert time.monotonic() - drained_s < 20
        moved = awaited(run, tmp_path, "transition", lambda event: event["step"] <= left["step"])
        assert moved["mode"] != "restart" and moved["verified"]
        keeper.ask("join")
        joined = awaited(
            run, tmp_path, "supply", lambda event: len(event["devices"]) == 4 and event["step"] > left["step"]
        )
        new = min(set(joined["devices"]) - set(left["devices"]))
        asked = nereus("reshape", str(tmp_path / "run"), f"reference-inference=d1t1p1@{new}", folder=asking)
        assert asked.code == 0, asked.output
        on_new = awaited(
            run,
            tmp_path,
            "transition",
            lambda event: event["step"] > left["step"] and new in Plan.from_json(event["to"]).devices,
        )
        awaited(run, tmp_path, "step", lambda event: event["step"] > on_new["step"])
        run.signal(signal.SIGINT, group=True)
        ended = run.wait(timeout_s=60)
    finally:
        run.end()
    assert ended.code == 130 and "Traceback" not in ended.output, ended.output


def configured(**changes: object) -> RunConfig:
    task = {"reasoning_gym": "chain_sum"}
    base = {
        "data": {"train": task, "val": task},
        "model": {"path": "models/some"},
        "reward": {"function": "some.module:score"},
        "cluster": {"workers": 6, "address": "auto"},
        "adapt": True,
    }
    return parse_config(base | changes)


def test_a_job_follows_its_cluster_where_it_joined_one_adapts_and_has_no_trace() -> None:
    assert follows_cluster(configured())
    assert not follows_cluster(configured(adapt=False))
    assert not follows_cluster(configured(cluster={"workers": 6}))
    assert not follows_cluster(configured(supply={"trace": "trace.csv"}))


def test_it_may_start_once_its_first_plan_has_devices() -> None:
    assert ray_settings(configured()).min_workers == 1
    stages = ("actor-generation", "reference-inference", "critic-inference", "critic-training", "actor-training")
    on = dict.fromkeys(stages, "d1t1p1@3")
    assert ray_settings(configured(plan=on)).min_workers == 4
    assert ray_settings(configured(adapt=False)).min_workers is None
