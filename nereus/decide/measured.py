"""The measured steps of a run: of late, and on the plans it has been on before. Pure.

What a step says of predictions is the ratio of its measured to its predicted seconds, the prediction being for its own
lengths and by what is known when the ratio is asked for.
"""

import dataclasses
import statistics
from collections.abc import Mapping

from nereus.decide.seam import Outlook
from nereus.decide.triggers import EFFICIENCY_WINDOW, MEASURED_STEPS
from nereus.plan import Plan
from nereus.planner.workload import LengthSummary
from nereus.runtime.seam import StepReport

RECENT_STEPS = 3
"""Steps over which lengths are averaged for predictions."""

REMEMBERED_PLANS = 4
"""Plans whose measured steps are remembered, the one in force among them."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step and the plan it ran on. counts: whether its seconds tell anything; those of a warm-up do not."""

    plan: Plan
    report: StepReport
    counts: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What has been measured so far.

    recent: the last steps on whatever plan. by_plan: of each remembered plan the last steps that count, the newest plan
    last. num_on_plan: steps that count since the last move.
    """

    recent: tuple[MeasuredStep, ...] = ()
    by_plan: Mapping[Plan, tuple[StepReport, ...]] = dataclasses.field(default_factory=dict)
    num_on_plan: int = 0

    def seen(self, plan: Plan, report: StepReport, *, counts: bool) -> "Measured":
        """After one more step, on `plan`."""
        recent = (*self.recent, MeasuredStep(plan, report, counts))[-EFFICIENCY_WINDOW:]
        if not counts:
            return dataclasses.replace(self, recent=recent)
        by_plan = {known: steps for known, steps in self.by_plan.items() if known != plan}
        by_plan[plan] = (*self.by_plan.get(plan, ()), report)[-EFFICIENCY_WINDOW:]
        if len(by_plan) > REMEMBERED_PLANS:
            del by_plan[next(iter(by_plan))]
        return Measured(recent, by_plan, self.num_on_plan + 1)

    def moved(self) -> "Measured":
        """After the job has come to another plan."""
        return dataclasses.replace(self, num_on_plan=0)

    @property
    def on_plan(self) -> tuple[StepReport, ...]:
        """The last steps that count since the last move."""
        counted = tuple(step.report for step in self.recent if step.counts)
        return counted[-self.num_on_plan :] if self.num_on_plan else ()

    @property
    def lengths(self) -> LengthSummary | None:
        """Means of the last steps, and the longest response of them; None before the first."""
        last = [step.report.lengths for step in self.recent[-RECENT_STEPS:]]
        return _average(last) if last else None

    @property
    def last_s(self) -> float:
        """Seconds of the last step; 0 before the first."""
        return self.recent[-1].report.step_s if self.recent else 0.0

    def ratio_on(self, plan: Plan, outlook: Outlook) -> float | None:
        """The median ratio of a plan's last steps; None where there are too few."""
        steps = self.by_plan.get(plan, ())
        return _median([(plan, report) for report in steps], outlook)

    def ratio_now(self, plan: Plan | None, outlook: Outlook) -> float:
        """The ratio of the plan in force; while it is new, that of the last steps on whatever plan; at first 1."""
        own = self.ratio_on(plan, outlook) if plan else None
        if own is not None:
            return own
        late = _median([(step.plan, step.report) for step in self.recent if step.counts], outlook)
        return late if late is not None else 1.0


def _median(steps: list[tuple[Plan, StepReport]], outlook: Outlook) -> float | None:
    if len(steps) < MEASURED_STEPS:
        return None
    return statistics.median(report.step_s / outlook.predict(plan, report.lengths).step_s for plan, report in steps)


def _average(recent: list[LengthSummary]) -> LengthSummary:
    count = len(recent)
    return LengthSummary(
        mean=sum(x.mean for x in recent) / count,
        p95=sum(x.p95 for x in recent) / count,
        longest=max(x.longest for x in recent),
        prompt_mean=sum(x.prompt_mean for x in recent) / count,
    )
