"""Gives the steps of a transition their place in the global order. Pure."""

from nereus.plan import Plan
from nereus.transition.chain import Step
from nereus.transition.primitives import Edge, EdgeKind, Load, Mode, Operation, TransitionDag


class Placer:
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
