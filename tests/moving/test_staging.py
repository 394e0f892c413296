"""A swap without room goes through host memory on real buffers, ends whole either way, and keeps its predicted peak."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from feasibility import Feasible, check_feasible
from movers import ThreadMovers, ThreadWorker, assert_holds, tiny_spec

from nereus.cluster import ACCELERATORS, Cluster, Device
from nereus.comm.buffers import SharedMemory
from nereus.errors import TransitionAborted
from nereus.moving.commands import StageKinds
from nereus.moving.executor import Execution, OperationEnd
from nereus.plan import ACTOR_TRAINING, CRITIC_TRAINING, Layout, Plan, StagePlan
from nereus.shards.state import StateKind
from nereus.transition.dag import build_dag
from nereus.transition.operations import Infeasible, Mode, Primitive, TransitionDag
from nereus.transition.price import DeviceTable, Rates, StageState

FP32 = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
STATES = {
    ACTOR_TRAINING: StageKinds(tiny_spec(), FP32),
    CRITIC_TRAINING: StageKinds(tiny_spec(hidden=8, ffn=19), FP32),
}
SIZES = {stage: StageState(kinds.spec, kinds.element_bytes) for stage, kinds in STATES.items()}
RATES = Rates.of(Cluster((), (ACCELERATORS["cpu"],)))


class TrackedMemory(SharedMemory):
    """Device memory that knows its peak and refuses what passes a limit, as a device does."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes, self.peak_bytes = limit_bytes, 0

    def __call__(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        flat = super().__call__(numel, dtype)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        if self.num_bytes > self.limit_bytes:
            raise MemoryError(f"{self.num_bytes} of {self.limit_bytes} bytes")
        return flat


def node_of(device: int) -> str:
    return f"node{device // 4}"


def table_of(limit_bytes: int, host_bytes: int) -> DeviceTable:
    devices = tuple(Device(i, node_of(i), "cpu", 2 * limit_bytes) for i in range(8))
    table = DeviceTable.of(Cluster(devices, (ACCELERATORS["cpu"],)), host_bytes_per_node=host_bytes)
    table.limit_bytes[:] = limit_bytes
    return table


def planned(current: Plan, target: Plan, table: DeviceTable) -> TransitionDag | Infeasible:
    return build_dag(current, target, states=SIZES, table=table, rates=RATES)


def plan_of(actor: str, critic: str) -> Plan:
    return Plan.parse({"actor-training": actor, "critic-training": critic})


def fullest(*plans: Plan) -> int:
    """Bytes of the fullest device under the plans."""
    found: list[int] = []
    for plan in plans:
        outcome = check_feasible(TransitionDag(plan, plan, Mode.SHADOW), states=SIZES, table=table_of(10**9, 0))
        assert isinstance(outcome, Feasible)
        found.append(max(outcome.peak_bytes.values()))
    return max(found)


@pytest.fixture
def make_movers() -> Iterator[Callable[[int], ThreadMovers]]:
    """Movers whose devices hold at most so many bytes."""
    made: list[ThreadMovers] = []

    def make(limit_bytes: int) -> ThreadMovers:
        made.append(ThreadMovers(8, timeout_s=2))
        for worker in made[-1].workers.values():
            worker.residents.memory = TrackedMemory(limit_bytes)
        return made[-1]

    yield make
    for movers in made:
        movers.close()


def peaks(movers: ThreadMovers) -> dict[int, int]:
    """Peak of every device since the last call, which starts again from what is held."""
    found: dict[int, int] = {}
    for device, worker in movers.workers.items():
        memory = worker.residents.memory
        assert isinstance(memory, TrackedMemory)
        found[device], memory.peak_bytes = memory.peak_bytes, memory.num_bytes
    return found


def check_exactly(movers: ThreadMovers, epoch: int, plan: Plan) -> None:
    """Every buffer of the plan is bitwise right, and there is no other, nor anything in host memory."""
    count = 0
    for stage, _ in plan.stages:
        for unit in movers.states(epoch, stage, plan).values():
            assert_holds(unit, STATES[stage], stage)
            count += 1
    assert sum(len(keys) for keys in movers.keys.values()) == count
    assert all(worker.residents.host_memory.num_bytes == 0 for worker in movers.workers.values())


SWAPS = {
    "one device each": (plan_of("d1t1p1@0", "d1t1p1@1"), plan_of("d1t1p1@1", "d1t1p1@0")),
    "units of two": (plan_of("d1t2p1@0-1", "d1t2p1@2-3"), plan_of("d1t2p1@2-3", "d1t2p1@0-1")),
    "another layout": (plan_of("d1t2p1@0-1", "d1t1p2@2-3"), plan_of("d1t1p2@3,2", "d1t2p1@1,0")),
    "across nodes": (plan_of("d1t2p1@0-1", "d1t2p1@4-5"), plan_of("d1t2p1@4-5", "d1t2p1@0-1")),
    "ranks and stages": (plan_of("d1t2p1@0-1", "d1t2p1@2-3"), plan_of("d1t2p1@3,2", "d1t2p1@1,0")),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_swap_without_room_goes_through_host_memory_and_ends_bitwise_equal(
    make_movers: Callable[[int], ThreadMovers], name: str
) -> None:
    current, target = SWAPS[name]
    limit = fullest(current, target) * 11 // 10
    table = table_of(limit, 10**6)
    dag = planned(current, target, table)
    assert isinstance(dag, TransitionDag)
    assert {Primitive.OFFLOAD, Primitive.RELOAD} <= {operation.primitive for operation in dag.operations}
    movers = make_movers(limit)
    movers.fill(0, current, STATES)
    ended: list[OperationEnd] = []
    report = Execution(
        dag, movers, states=STATES, epoch=1, node_of=node_of, table=table, on_operation=ended.append
    ).run(lambda: None)
    check_exactly(movers, 1, target)
    assert report.bytes_moved >= report.bytes_lower_bound
    assert sorted(end.name for end in ended) == sorted(operation.name for operation in dag.operations)
    assert [end.done for end in ended] == list(range(1, len(ended) + 1)) and ended[-1].total == len(ended)
    assert sum(end.bytes_moved for end in ended) == report.bytes_moved


def raising(worker: ThreadWorker) -> None:
    raise RuntimeError("injected")


def fail_at_call(movers: ThreadMovers, method: str, nth: int) -> None:
    """Let one device of the `nth` call of a method that the executor makes fail."""
    plain, count = getattr(movers, method), 0

    def call(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == nth:
            movers.faults[min(next(iter(arguments))), method] = raising  # type: ignore[call-overload]
        return plain(*arguments)

    setattr(movers, method, call)


@pytest.mark.parametrize("name", ["one device each", "another layout", "across nodes"])
@pytest.mark.parametrize(
    ("method", "nth"),
    [("move", 1), ("digests", 1), ("release", 1), ("prepare", 2), ("move", 2), ("release", 2), ("digests", 3),
     ("release", 3)],
)  # fmt: skip
def test_a_failure_anywhere_in_a_staged_swap_brings_the_old_plan_back(
    make_movers: Callable[[int], ThreadMovers], name: str, method: str, nth: int
) -> None:
    """The devices stay as tight as they are for the swap itself: the way back needs no room either."""
    current, target = SWAPS[name]
    limit = fullest(current, target) * 11 // 10
    table = table_of(limit, 10**6)
    dag = planned(current, target, table)
    assert isinstance(dag, TransitionDag)
    movers = make_movers(limit)
    movers.fill(0, current, STATES)
    fail_at_call(movers, method, nth)
    execution = Execution(dag, movers, states=STATES, epoch=1, node_of=node_of, table=table)
    with pytest.raises(TransitionAborted, match="injected"):
        execution.run(lambda: None)
    assert not execution.problems
    check_exactly(movers, 0, current)
    Execution(dag, movers, states=STATES, epoch=2, current_epoch=0, node_of=node_of, table=table).run(lambda: None)
    check_exactly(movers, 2, target)


@pytest.mark.parametrize("name", SWAPS)
def test_a_swap_that_is_whole_but_is_not_seated_is_swapped_back(
    make_movers: Callable[[int], ThreadMovers], name: str
) -> None:
    """Every old buffer is gone by then, and its place taken: the way back goes through host memory as well."""
    current, target = SWAPS[name]
    limit = fullest(current, target) * 11 // 10
    table = table_of(limit, 10**6)
    dag = planned(current, target, table)
    assert isinstance(dag, TransitionDag)
    movers = make_movers(limit)
    movers.fill(0, current, STATES)
    movers.faults[target.devices[0], "seat"] = raising
    execution = Execution(dag, movers, states=STATES, epoch=1, node_of=node_of, table=table)
    with pytest.raises(TransitionAborted, match="injected"):
        execution.run(lambda: None)
    assert not execution.problems
    check_exactly(movers, 0, current)


def test_a_bit_that_flips_in_host_memory_is_found(make_movers: Callable[[int], ThreadMovers]) -> None:
    """The digest of a copy in host memory is taken when it is made, against the device's."""
    current, target = SWAPS["one device each"]
    limit = fullest(current, target) * 11 // 10
    table = table_of(limit, 10**6)
    dag = planned(current, target, table)
    assert isinstance(dag, TransitionDag)
    movers = make_movers(limit)
    movers.fill(0, current, STATES)
    (device,) = dag.operations[0].devices

    def flip(worker: ThreadWorker) -> None:
        key = next(key for key in worker.residents.keys if key.in_host)
        worker.residents.buffer(key).flats[StateKind.EXP_AVG].view(torch.uint8)[0] ^= 1

    movers.faults[device, "after move"] = flip
    with pytest.raises(TransitionAborted, match="checksums differ"):
        Execution(dag, movers, states=STATES, epoch=1, node_of=node_of, table=table).run(lambda: None)
    check_exactly(movers, 0, current)


@pytest.mark.parametrize("host_bytes", [0, 1000])
def test_a_swap_that_host_memory_has_no_room_for_is_refused_with_the_reason(host_bytes: int) -> None:
    current, target = SWAPS["one device each"]
    dag = planned(current, target, table_of(fullest(current, target) * 11 // 10, host_bytes))
    assert isinstance(dag, Infeasible)
    assert "shadow: device" in dag.reason and "in place:" in dag.reason
    assert "free" in dag.reason and "host memory has no room to stage it" in dag.reason


RANK_SWAPS = [
    (plan_of("d1t2p1@0-1", "d1t1p1@2"), plan_of("d1t2p1@1,0", "d1t1p1@3")),
    (plan_of("d1t3p1@0-2", "d1t1p1@3"), plan_of("d1t3p1@1,2,0", "d1t1p1@3")),
    (plan_of("d2t2p1@0-3", "d1t1p1@4"), plan_of("d2t2p1@1,0,3,2", "d1t1p1@4")),
]


@pytest.mark.parametrize(("current", "target"), RANK_SWAPS)
@pytest.mark.parametrize("point", ["digests", "seat"])
def test_a_swap_of_ranks_in_place_is_undone(
    make_movers: Callable[[int], ThreadMovers], current: Plan, target: Plan, point: str
) -> None:
    """Devices hold two buffers of one layout meanwhile, and the new ones may be all that lives."""
    shadow = planned(current, target, table_of(10**9, 0))
    assert isinstance(shadow, TransitionDag)
    dag = TransitionDag(current, target, Mode.IN_PLACE, shadow.operations, shadow.edges, shadow.loads)
    movers = make_movers(10**9)
    movers.fill(0, current, STATES)
    movers.faults[1, point] = raising
    execution = Execution(dag, movers, states=STATES, epoch=1, node_of=node_of)
    with pytest.raises(TransitionAborted, match="injected"):
        execution.run(lambda: None)
    assert not execution.problems
    check_exactly(movers, 0, current)


def random_plan(generator: random.Random) -> Plan:
    stages = {}
    for stage in (ACTOR_TRAINING, CRITIC_TRAINING):
        layout = Layout(generator.choice([1, 2, 3]), generator.choice([1, 2]))
        dp = generator.randint(1, 8 // layout.num_ranks)
        stages[stage] = StagePlan.of(layout, generator.sample(range(8), dp * layout.num_ranks))
    return Plan.of(stages)


def test_the_measured_peak_of_random_transitions_is_the_simulated_one(
    make_movers: Callable[[int], ThreadMovers],
) -> None:
    """On every device, in shadow and in place and through host memory, with failed attempts in between."""
    generator, movers, modes, primitives = random.Random(1), make_movers(10**9), set(), set()
    plan, epoch = random_plan(generator), 0
    movers.fill(0, plan, STATES)
    for attempt in range(1, 25):
        if attempt % 3:
            target, room = random_plan(generator), (1.02, 1.15, 1.4, 3.0)[attempt % 4]
        else:
            target, room = Plan.of({ACTOR_TRAINING: plan[CRITIC_TRAINING], CRITIC_TRAINING: plan[ACTOR_TRAINING]}), 1.02
        limit = int(fullest(plan, target) * room)
        table = table_of(limit, 10**6)
        dag = planned(plan, target, table)
        if isinstance(dag, Infeasible):
            continue
        outcome = check_feasible(dag, states=SIZES, table=table)
        assert isinstance(outcome, Feasible)
        peaks(movers)
        execution = Execution(
            dag, movers, states=STATES, epoch=attempt, current_epoch=epoch, node_of=node_of, table=table
        )
        if generator.random() < 0.25:
            movers.faults[generator.choice(target.devices), "seat"] = raising
            with pytest.raises(TransitionAborted, match="injected"):
                execution.run(lambda: None)
            assert not execution.problems
            assert all(peak <= limit for peak in peaks(movers).values())
            check_exactly(movers, epoch, plan)
            continue
        execution.run(lambda: None)
        plan, epoch = target, attempt
        measured = peaks(movers)
        assert all(measured[device] <= peak for device, peak in outcome.peak_bytes.items())
        assert all(peak == outcome.peak_bytes.get(device, 0) for device, peak in measured.items())
        check_exactly(movers, epoch, plan)
        modes.add(dag.mode)
        primitives |= {operation.primitive for operation in dag.operations}
    assert modes == set(Mode) and Primitive.RELOAD in primitives
