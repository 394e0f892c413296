"""What the controller asks at each boundary of a run that adapts: supply and decider, with every input recorded.

    rule(step, now) : supply.at -> `supply` event where the view changed -> Decider.boundary -> `trigger`, `decision`
    moved, aborted, ended: what was done, told to the decider

It neither runs nor moves anything, and reads no clock: the controller says what time it is.
"""

from collections.abc import Callable

from nereus.decide.decider import Decider, Ruling, supply_event
from nereus.decide.signals import Signals
from nereus.plan import Plan
from nereus.reports.events import Event
from nereus.runtime.seam import StepReport
from nereus.supply.supply import Supply, SupplyView


class Adaptation:
    """The decisions of one run. `observe` is told of every event, in order."""

    def __init__(self, supply: Supply, decider: Decider, observe: Callable[[Event], None]) -> None:
        self._supply, self._decider, self._observe = supply, decider, observe
        self._view: SupplyView | None = None

    @property
    def paused(self) -> bool:
        """Whether the job waits, off all devices, for a supply that holds a plan."""
        return self._decider.plan is None

    def rule(self, step: int, *, now_s: float) -> Ruling:
        """The ruling before `step`, `now_s` seconds into the run. While paused an unchanged supply changes nothing."""
        view = self._supply.at(now_s)
        if view == self._view and self.paused:
            return Ruling(step, None)
        if view != self._view:
            self._view = view
            self._observe(supply_event(step, view))
        ruling = self._decider.boundary(step, view)
        for event in ruling.events:
            self._observe(event)
        return ruling

    def moved(self, target: Plan, *, seconds: float | None = None) -> None:
        """The job is on `target`: by a ruling, a recipe or a hand. seconds: of a live transition."""
        self._decider.moved(target, seconds=seconds)

    def aborted(self, target: Plan, step: int) -> None:
        """A transition to `target` before `step` was refused or rolled back; its event has been observed."""
        self._decider.aborted(target, step)

    def ended(self, report: StepReport) -> None:
        """A step has ended; its event has been observed."""
        self._decider.observe(Signals.of(report))
