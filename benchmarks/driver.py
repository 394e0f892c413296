"""What the driver computes for a new plan and for a step, without processes: it must not grow with devices squared.

PPO of an 8B model on nodes of eight devices, at 64 to 4,096 devices, each size in a process of its own so that nothing
is known from before. A new plan costs: which device takes which place, the ordered transition, its moves cut into the
part of every device, what seats are told, and the first weight synchronization. A step costs one synchronization more.
Everything is what the product calls; seconds are of one processor thread; what would be sent is pickled and counted.

`nereus bench driver`; --quick leaves out 4,096.
"""

import argparse
import json
import pickle
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import dag as dag_bench

from nereus.moving.commands import MoveOrder, StageKinds
from nereus.moving.executor import Execution
from nereus.plan import MODEL_STAGES, Plan, Role, Stage
from nereus.shards.moves import Holding
from nereus.shards.state import state_dtypes
from nereus.transition.assignment import assign
from nereus.transition.judged import plan_transition
from nereus.transition.operations import Infeasible
from nereus.transition.price import DeviceTable, Rates
from nereus.workflow import step_workflow

SIZES = (64, 1024, 4096)
STATES = {
    m: StageKinds(
        dag_bench.STATES[m].spec, tuple(state_dtypes(torch.bfloat16, trains=m.stage is Stage.TRAINING).items())
    )
    for m in MODEL_STAGES
}
CALLS_A_SYNC, CALLS_A_STEP = 4, 1
"""Calls of each worker that takes part: prepare, move, digests, settle of a synchronization; what it observed."""


def measure(num_devices: int) -> list[dict[str, Any]]:
    """A row for each kind of transition at one size."""
    rows = []
    for case in dag_bench.timing_cases(num_devices):
        nodes = {device.id: device.node for device in case.cluster.devices}
        table, rates = DeviceTable.of(case.cluster), Rates.of(case.cluster)
        begun = time.process_time()
        target = assign(case.current, case.target, states=dag_bench.STATES, table=table, cluster=case.cluster)
        transition = plan_transition(case.current, target, states=dag_bench.STATES, table=table, rates=rates)
        assert not isinstance(transition, Infeasible), transition
        judged_s = time.process_time() - begun
        execution = Execution(transition.dag, None, states=STATES, epoch=1, node_of=nodes.__getitem__)  # type: ignore[arg-type]
        orders = [
            execution.order_of(operation).per_device() for operation in transition.dag.operations if operation.acquires
        ]
        assert execution.bytes_lower_bound <= transition.bytes_moved * (1 + 1e-9) or transition.bytes_moved == 0
        plan_s = time.process_time() - begun
        first_sync_s, sync_bytes, _ = synchronize(target, nodes)
        sync_s, _, calls = synchronize(target, nodes)
        seat_bytes = len(pickle.dumps(target)) + len(pickle.dumps(nodes))
        rows.append(
            {
                "devices": num_devices,
                "case": case.name,
                "plan_s": plan_s + first_sync_s,
                "judged_s": judged_s,
                "sync_s": sync_s,
                "plan_bytes": sum(len(pickle.dumps(part)) for order in orders for part in order.values()) + seat_bytes,
                "sync_bytes": sync_bytes,
                "step_calls": calls + CALLS_A_STEP * len(target.devices),
            }
        )
    return rows


def synchronize(plan: Plan, nodes: dict[int, str]) -> tuple[float, int, int]:
    """(seconds, bytes, calls) of bringing every copy of trained parameters up to date, as the driver does."""
    begun, parts = time.process_time(), []
    for source, target in step_workflow("ppo", tuple(Role)).syncs_under(plan):
        order = MoveOrder.plan(
            f"e1/sync/{target}", STATES[target], source, Holding.of(plan[source]), target, Holding.of(plan[target]),
            node_of=nodes.__getitem__, allocates=False, keeps_group=True,
        )  # fmt: skip
        parts += order.per_device().values()
    seconds = time.process_time() - begun
    return seconds, sum(len(pickle.dumps(part)) for part in parts), CALLS_A_SYNC * len(parts)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure every size in a process of its own, print the table, return the result."""
    rows: list[dict[str, Any]] = []
    for size in SIZES[:-1] if quick else SIZES:
        command = [sys.executable, __file__, "--size", str(size)]
        rows += json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=550).stdout)
    table = Table(title="what the driver computes and sends, PPO of an 8B model, nodes of 8")
    for name in (
        "devices",
        "case",
        "new plan s",
        "of it judging s",
        "a step's sync s",
        "plan MB",
        "sync MB",
        "calls a step",
    ):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(
            str(row["devices"]), row["case"], f"{row['plan_s']:.3f}", f"{row['judged_s']:.3f}", f"{row['sync_s']:.4f}",
            f"{row['plan_bytes'] / 1e6:.1f}", f"{row['sync_bytes'] / 1e6:.1f}", str(row["step_calls"]),
        )  # fmt: skip
    Console().print(table)
    sizes = sorted({row["devices"] for row in rows})

    def worst(name: str) -> dict[str, float]:
        return {str(size): max(row[name] for row in rows if row["devices"] == size) for size in sizes}

    return {
        "metrics": {
            "plan_s": worst("plan_s"),
            "sync_s": worst("sync_s"),
            "bytes": worst("plan_bytes"),
            "sync_bytes": worst("sync_bytes"),
            "step_calls": worst("step_calls"),
        },
        "setup": {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "sizes": sizes,
        },
        "rows": rows,
        "command": "nereus bench driver" + (" --quick" if quick else ""),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.size is not None:
        print(json.dumps(measure(arguments.size)))
    else:
        run(quick=arguments.quick)
