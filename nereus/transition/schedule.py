"""In which order the operations of a transition run, when each does, and how long the whole takes. Pure.

Every rank runs its operations in this order, so an order is a schedule: each operation starts when its predecessors
and all earlier operations on its devices have ended. List scheduling by the longest path to the end comes first; where
that misses the lower bound, a bounded branch and bound looks for better."""

import dataclasses
from collections.abc import Sequence

from nereus.plan import Plan
from nereus.transition.operations import Edge, EdgeKind, Load, Mode, Operation, TransitionDag
from nereus.transition.price import Rates
from nereus.transition.steps import Step

NODE_LIMIT = 200
"""Partial orders the search may open; with six operations that is most of them, in under a millisecond."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimedOperation:
    """An operation to be ordered: `seconds`, and bit masks of those it follows and those it shares a device with."""

    seconds: float
    after: int = 0
    conflicts: int = 0


def best_order(operations: Sequence[TimedOperation], *, node_limit: int = NODE_LIMIT) -> tuple[int, ...]:
    """Indices of `operations` in the order to run them. Predecessors must have lower indices; ties keep the order."""
    search = _Search(operations, node_limit)
    search.start_with_list_schedule()
    bound = max(max(search.tails, default=0.0), heaviest_clique(operations))
    if search.best_s > bound * (1 + 1e-9):
        search.branch([], 0, [0.0] * len(operations), 0.0)
    return tuple(search.best)


def heaviest_clique(operations: Sequence[TimedOperation]) -> float:
    """Seconds of the longest set of operations that pairwise share devices or follow each other: none can overlap.

    Found greedily from every operation, so it is a lower bound on the makespan and mostly the best of its kind.
    """
    related = [operation.conflicts | operation.after for operation in operations]
    for index, operation in enumerate(operations):
        for i in range(index):
            if operation.after >> i & 1:
                related[i] |= 1 << index
    by_length = sorted(range(len(operations)), key=lambda i: -operations[i].seconds)
    longest = 0.0
    for first in by_length:
        common, total = related[first], operations[first].seconds
        for i in by_length:
            if common >> i & 1:
                common &= related[i]
                total += operations[i].seconds
        longest = max(longest, total)
    return longest


def makespan(operations: Sequence[TimedOperation], order: Sequence[int]) -> float:
    """Seconds until the last operation ends under an order."""
    ends: dict[int, float] = {}
    for index in order:
        waits = operations[index].after | operations[index].conflicts
        ends[index] = max((end for i, end in ends.items() if waits >> i & 1), default=0.0) + operations[index].seconds
    return max(ends.values(), default=0.0)


class _Search:
    """Depth-first branch and bound over orders; the best found so far is always a whole order."""

    def __init__(self, operations: Sequence[TimedOperation], node_limit: int) -> None:
        self.operations = operations
        self.nodes_left = node_limit
        self.tails = _tails(operations)
        self.by_tail = sorted(range(len(operations)), key=lambda i: -self.tails[i])
        self.best: list[int] = list(range(len(operations)))
        self.best_s = makespan(operations, self.best)

    def start_with_list_schedule(self) -> None:
        """Repeatedly place the ready operation that can start first, longest path first among equals."""
        placed: list[int] = []
        mask, earliest = 0, [0.0] * len(self.operations)
        while len(placed) < len(self.operations):
            ready = [i for i in self.by_tail if not mask >> i & 1 and self.operations[i].after & ~mask == 0]
            index = min(ready, key=lambda i: earliest[i])
            earliest = self._placed(index, earliest)
            placed.append(index)
            mask |= 1 << index
        seconds = makespan(self.operations, placed)
        if seconds <= self.best_s:
            self.best, self.best_s = placed, seconds

    def _placed(self, index: int, earliest: Sequence[float]) -> list[float]:
        """Earliest starts once an operation has its place."""
        operation, end, bit = self.operations[index], earliest[index] + self.operations[index].seconds, 1 << index
        result = list(earliest)
        for i, other in enumerate(self.operations):
            if (operation.conflicts >> i & 1 or other.after & bit) and result[i] < end:
                result[i] = end
        return result

    def branch(self, placed: list[int], mask: int, earliest: list[float], ended_s: float) -> None:
        if len(placed) == len(self.operations):
            if ended_s < self.best_s:
                self.best, self.best_s = list(placed), ended_s
            return
        for index in self.by_tail:
            if mask >> index & 1 or self.operations[index].after & ~mask:
                continue
            if self.nodes_left <= 0:
                return
            self.nodes_left -= 1
            after = self._placed(index, earliest)
            rest = mask | 1 << index
            bound = max((after[i] + self.tails[i] for i in self.by_tail if not rest >> i & 1), default=0.0)
            ended = max(ended_s, earliest[index] + self.operations[index].seconds)
            if max(bound, ended) < self.best_s * (1 - 1e-9):
                self.branch([*placed, index], rest, after, ended)


def _tails(operations: Sequence[TimedOperation]) -> list[float]:
    """Longest path from the start of each operation to the end of all that follow it."""
    tails = [operation.seconds for operation in operations]
    for index in range(len(operations) - 1, -1, -1):
        for i in range(index):
            if operations[index].after >> i & 1:
                tails[i] = max(tails[i], operations[i].seconds + tails[index])
    return tails


def waits(dag: TransitionDag) -> list[set[int]]:
    """For every operation the earlier ones it waits for: its edges, the commit, the last one on each of its devices."""
    result: list[set[int]] = [set() for _ in dag.operations]
    for index in range(dag.num_staged, len(dag.operations)):
        result[index].update(range(dag.num_staged))
    for edge in dag.edges:
        result[edge.after].add(edge.before)
    last: dict[int, int] = {}
    for operation in dag.operations:
        devices = operation.devices
        result[operation.id].update(last[device] for device in devices if device in last)
        last.update(dict.fromkeys(devices, operation.id))
    return result


def transition_seconds(dag: TransitionDag, rates: Rates) -> float:
    """Predicted seconds of the whole transition: the critical path with shared links.

    Operations that run at once and enter the same node slow each other down where together they ask for more than the
    node's link gives: each then advances at the share that its most crowded node leaves it.
    """
    before = waits(dag)
    left = [load.seconds for load in dag.loads]
    ended: set[int] = set()
    now_s = 0.0
    while len(ended) < len(left):
        running = [i for i in range(len(left)) if i not in ended and before[i] <= ended]
        speeds = _speeds(dag, running, rates)
        step_s = min(left[i] / speed for i, speed in zip(running, speeds, strict=True))
        now_s += step_s
        for i, speed in zip(running, speeds, strict=True):
            left[i] -= step_s * speed
            if left[i] <= 1e-12 * (1 + dag.loads[i].seconds):
                ended.add(i)
    return now_s


def _speeds(dag: TransitionDag, running: list[int], rates: Rates) -> list[float]:
    """Share of its speed on idle links that each running operation gets."""
    if rates.node_bytes_per_s is None:
        return [1.0] * len(running)
    asked: dict[int, float] = {}
    for i in running:
        for node, entering in enumerate(dag.loads[i].node_bytes):
            asked[node] = asked.get(node, 0.0) + entering / max(dag.loads[i].seconds, 1e-12)
    slowdown = {node: max(1.0, rate / rates.node_bytes_per_s) for node, rate in asked.items()}
    return [
        1.0 / max((slowdown[n] for n, entering in enumerate(dag.loads[i].node_bytes) if entering), default=1.0)
        for i in running
    ]


class DagBuilder:
    """Collects operations in the order they will run; an edge can only point backwards, so there is no cycle."""

    def __init__(self, current: Plan, target: Plan, mode: Mode) -> None:
        self._plans = current, target
        self._mode = mode
        self._operations: list[Operation] = []
        self._edges: list[Edge] = []
        self._loads: list[Load] = []

    def add(self, step: Step, *, local: tuple[int, ...] = (), resource: tuple[int, ...] = ()) -> int:
        """Place a step last; returns its id. An edge that is both local and resource counts as local."""
        index = len(self._operations)
        self._operations.append(step.operation(index))
        for before in dict.fromkeys(local):
            self._edges.append(Edge(before, index, EdgeKind.LOCAL))
        for before in dict.fromkeys(resource):
            if before not in local:
                self._edges.append(Edge(before, index, EdgeKind.RESOURCE))
        self._loads.append(step.load)
        return index

    def dag(self) -> TransitionDag:
        current, target = self._plans
        return TransitionDag(
            current, target, self._mode, tuple(self._operations), tuple(self._edges), tuple(self._loads)
        )  # fmt: skip
