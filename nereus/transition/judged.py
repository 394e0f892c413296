"""A transition as one value: what is judged before a step is what is executed and measured against. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping

from nereus.plan import ModelStage, Plan
from nereus.transition.dag import build_dag
from nereus.transition.operations import Infeasible, TransitionDag
from nereus.transition.price import DeviceTable, Rates, StageState
from nereus.transition.schedule import transition_seconds


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Transition:
    """One way from a plan to another, with what it rests on and what it is predicted to take.

    table, rates: the devices and speeds that the DAG was ordered for; the way back from an abort uses the table too.
    move_s: from the first operation until every device has joined its groups, which is all that a change of settings
    takes; start_s: until workers that do not run yet answer, before it.
    lost: devices whose state it does not read.
    """

    dag: TransitionDag
    table: DeviceTable
    rates: Rates
    move_s: float
    start_s: float = 0.0
    lost: frozenset[int] = frozenset()

    @property
    def current(self) -> Plan:
        return self.dag.current

    @property
    def target(self) -> Plan:
        return self.dag.target

    @property
    def seconds(self) -> float:
        """Predicted seconds of the whole, uncorrected."""
        return self.start_s + self.move_s

    @property
    def bytes_moved(self) -> int:
        """Bytes that are to arrive at a device from another."""
        return self.dag.moved_bytes


def plan_transition(
    current: Plan,
    target: Plan,
    *,
    states: Mapping[ModelStage, StageState],
    table: DeviceTable,
    rates: Rates,
    start_s: float = 0.0,
    lost: Iterable[int] = (),
) -> Transition | Infeasible:
    """The transition between two plans, or why there is none. start_s: what starting workers would add."""
    dead = frozenset(lost)
    dag = build_dag(current, target, states=states, table=table, rates=rates, lost=dead)
    if isinstance(dag, Infeasible):
        return dag
    starts = not set(target.devices) <= set(current.devices)
    move_s = max(transition_seconds(dag, rates), rates.setup_s if target != current else 0.0)
    return Transition(dag, table, rates, move_s, start_s if starts else 0.0, dead)
