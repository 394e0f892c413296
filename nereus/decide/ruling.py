"""What is ruled before a step, as a value, and what of it is recorded."""

import dataclasses
import enum

from nereus.cluster import Cluster
from nereus.decide.admission import Verdict
from nereus.decide.triggers import Fired
from nereus.plan import Plan
from nereus.reports.events import Decision, Event, SupplyChange, TriggerFired
from nereus.supply.supply import SupplyView
from nereus.transition.judged import Transition


class Action(enum.StrEnum):
    """What the controller does with a ruling.

    KEEP: go on. MOVE: a live transition to the target. RESTART: save the state, start on the target from it.
    PAUSE: save the state and wait for a supply view with which `boundary` rules otherwise.
    """

    KEEP = "keep"
    MOVE = "move"
    RESTART = "restart"
    PAUSE = "pause"


@dataclasses.dataclass(frozen=True, slots=True)
class Ruling:
    """What was found and decided before a step. again: a declined target was examined again, without a replan."""

    step: int
    current: Plan | None
    triggers: tuple[Fired, ...] = ()
    verdict: Verdict | None = None
    action: Action = Action.KEEP
    again: bool = False
    predicted_step_s: float | None = None

    @property
    def target(self) -> Plan | None:
        """The plan to be on after the action; None where it stays."""
        return self.verdict.target if self.verdict and self.action in (Action.MOVE, Action.RESTART) else None

    @property
    def transition(self) -> Transition | None:
        """What a live move executes: the transition that was judged."""
        return self.verdict.transition if self.verdict and self.action is Action.MOVE else None

    @property
    def events(self) -> list[Event]:
        """What of it belongs in `events.jsonl`."""
        events: list[Event] = [
            TriggerFired(self.step, t.signal, value=t.value, reference=t.reference, threshold=t.threshold)
            for t in self.triggers
        ]
        if self.verdict is not None:
            events.append(self._decision(self.verdict))
        return events

    def _decision(self, verdict: Verdict) -> Decision:
        return Decision(
            self.step,
            verdict=verdict.name,
            action=self.action.value,
            reason=verdict.reason,
            current=self.current,
            target=verdict.target,
            again=self.again,
            numbers=verdict.numbers,
        )


def supply_event(step: int, view: SupplyView, cluster: Cluster | None = None) -> SupplyChange:
    """The event to write before `boundary` wherever the view differs from the last one.

    cluster: the devices, where they differ from those known so far.
    """
    return SupplyChange(step, view.devices, tuple(a.to_json() for a in view.announced), view.deadline_s, cluster)
