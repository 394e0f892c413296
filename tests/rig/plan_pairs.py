"""Random pairs of plans on one cluster, and what its devices can hold."""

import dataclasses
import random
from collections.abc import Iterator

from hypothesis import strategies as st

from nereus.cluster import Accelerator, Cluster, uniform_cluster
from nereus.model import Head, ModelSpec
from nereus.plan import MODEL_STAGES, Layout, ModelStage, Plan, Role, Stage, StagePlan
from nereus.transition.diff import Held
from nereus.transition.operations import TransitionDag
from nereus.transition.price import DeviceTable, Rates, StageState
from nereus.transition.shadow import bytes_in_use

ACTOR = ModelSpec("llama", num_layers=5, hidden=32, num_heads=12, num_kv_heads=4, head_dim=8, ffn=61, vocab=131)
SPECS = {
    Role.ACTOR: ACTOR,
    Role.CRITIC: dataclasses.replace(ACTOR, num_layers=3, head=Head.SCORE),
    Role.REFERENCE: dataclasses.replace(ACTOR, tied=True),
    Role.REWARD: dataclasses.replace(ACTOR, hidden=24, num_heads=6, num_kv_heads=2, head=Head.SCORE),
}
STATES = {m: StageState(SPECS[m.role], 14 if m.stage is Stage.TRAINING else 2) for m in MODEL_STAGES}
CPU = Accelerator("cpu", 1e11, 10**9, 4e9, 4e9, 1e9)
RATES = Rates(4e9, 1e9, 4e9, 2e9, setup_s=0.01)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two plans on one cluster."""

    cluster: Cluster
    current: Plan
    target: Plan

    def table(self, *, room: float = 100.0, host_bytes: int = 0) -> DeviceTable:
        """Devices that can hold `room` times the larger of both plans on the fullest device."""
        free = DeviceTable.of(self.cluster)
        most = max(int(bytes_in_use(Held.of(plan), STATES, free).max()) for plan in (self.current, self.target))
        table = DeviceTable.of(self.cluster, host_bytes_per_node=host_bytes)
        table.limit_bytes[:] = int(most * room)
        return table


def random_stage_plan(rng: random.Random, model_stage: ModelStage, devices: list[int]) -> StagePlan:
    """Any layout the model admits, any dp, on some of the devices in any order or in ascending runs."""
    spec = SPECS[model_stage.role]
    layouts = [
        Layout(tp, pp)
        for tp in spec.valid_tp
        for pp in range(1, spec.num_layers + 1)
        if tp * pp <= min(len(devices), 12)
    ]
    layout = rng.choice(layouts)
    dp = rng.randint(1, min(len(devices) // layout.num_ranks, 8))
    if rng.random() < 0.5:
        chosen = rng.sample(devices, dp * layout.num_ranks)
    else:
        first = rng.randint(0, len(devices) - dp * layout.num_ranks)
        chosen = devices[first : first + dp * layout.num_ranks]
    return StagePlan.of(layout, chosen)


def random_plan(rng: random.Random, model_stages: list[ModelStage], devices: list[int]) -> Plan:
    stages = {m: random_stage_plan(rng, m, devices) for m in model_stages}
    for m in model_stages:
        training = ModelStage(m.role, Stage.TRAINING)
        if m != training and training in stages and rng.random() < 0.25:
            stages[m] = stages[training]
    return Plan.of(stages)


def random_pair(rng: random.Random, *, max_devices: int = 64) -> Pair:
    """A pair of plans of some of the model-stages; each stage of the target may equal that of the current plan."""
    per_node = rng.choice([1, 2, 4, 8])
    nodes = rng.randint(1, max_devices // per_node)
    cluster = uniform_cluster(num_nodes=nodes, devices_per_node=per_node, accelerator=CPU)
    devices = list(cluster.device_ids)
    model_stages = rng.sample(list(MODEL_STAGES), rng.randint(1, len(MODEL_STAGES)))
    current, target = (random_plan(rng, model_stages, devices) for _ in range(2))
    kept = {m: current[m] if rng.random() < 0.2 else stage_plan for m, stage_plan in target.stages}
    return Pair(cluster, current, Plan.of(kept))


pairs = st.integers(0, 2**32 - 1).map(lambda seed: random_pair(random.Random(seed)))


def random_execution(rng: random.Random, dag: TransitionDag) -> TransitionDag:
    """The DAG with its operations in another order that its ranks could run them in.

    What holds the order are the edges, and that each device runs its own operations in the global order.
    """
    waits: dict[int, set[int]] = {operation.id: set(dag.after(operation.id)) for operation in dag.operations}
    for earlier, later in _sharing(dag):
        waits[later].add(earlier)
    order: list[int] = []
    while waits:
        ready = [i for i, before in waits.items() if before.issubset(order)]
        order.append(rng.choice(ready))
        del waits[order[-1]]
    return dataclasses.replace(dag, operations=tuple(dag.operations[i] for i in order))


def _sharing(dag: TransitionDag) -> Iterator[tuple[int, int]]:
    last: dict[int, int] = {}
    for operation in dag.operations:
        for device in operation.devices:
            if device in last:
                yield last[device], operation.id
            last[device] = operation.id
