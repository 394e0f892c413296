"""What the controller asks at each boundary of a run that adapts: supply and decider, with every input recorded.

    rule(step, now) : supply.at -> `supply` event where the view changed -> Decider.boundary -> `trigger`, `decision`
    moved, aborted, ended: what was done, told to the decider

It neither runs nor moves anything, and reads no clock: the controller says what time it is.
"""

from collections.abc import Callable

from nereus.cluster import Cluster
from nereus.decide.decider import Decider
from nereus.decide.ruling import Ruling, supply_event
from nereus.plan import Plan
from nereus.reports.events import Event
from nereus.runtime.seam import StepReport
from nereus.supply.supply import Supply, SupplyView


class Adaptation:
    """The decisions of one run. `observe` is told of every event, in order.

    cluster: what the decider knows the devices as, where those may change.
    """

    def __init__(
        self, supply: Supply, decider: Decider, observe: Callable[[Event], None], *, cluster: Cluster | None = None
    ) -> None:
        self._supply, self._decider, self._observe = supply, decider, observe
        self._view: SupplyView | None = None
        self._cluster = cluster

    @property
    def paused(self) -> bool:
        """Whether the job waits, off all devices, for a supply that holds a plan."""
        return self._decider.plan is None

    def rule(self, step: int, *, now_s: float, cluster: Callable[[], Cluster | None] = lambda: None) -> Ruling:
        """The ruling before `step`, `now_s` seconds into the run. While paused an unchanged supply changes nothing.

        cluster: the devices as they are; asked after the supply, which may have given ids to devices that joined.
        """
        view = self._supply.at(now_s)
        found = cluster()
        regrouped = found if found != self._cluster else None
        self._cluster = found
        if view == self._view and not regrouped and self.paused:
            return Ruling(step, None)
        if view != self._view or regrouped:
            self._view = view
            self._observe(supply_event(step, view, regrouped))
        if regrouped:
            self._decider.recluster(regrouped)
        ruling = self._decider.boundary(step, view)
        for event in ruling.events:
            self._observe(event)
        return ruling

    def moved(self, target: Plan, *, seconds: float | None = None, predicted_s: float = 0.0) -> None:
        """The job is on `target`: by a ruling, a recipe or a hand. seconds, predicted_s: of a live transition."""
        self._decider.moved(target, seconds=seconds, predicted_s=predicted_s)

    def fell_back(self, plan: Plan) -> None:
        """The job goes on with what was whole of its plan."""
        self._decider.fell_back(plan)

    def aborted(self, target: Plan, step: int) -> None:
        """A transition to `target` before `step` was refused or rolled back; its event has been observed."""
        self._decider.aborted(target, step)

    def ended(self, report: StepReport) -> None:
        """A step has ended; its event has been observed."""
        self._decider.observe(report)
