"""An outlook over a written table of plans: every prediction is a number a test can check by hand."""

import dataclasses
from collections.abc import Callable, Mapping

from nereus.cluster import ACCELERATORS, Cluster, uniform_cluster
from nereus.decide.seam import Outlook, Prediction
from nereus.plan import Plan
from nereus.planner.workload import LengthSummary
from nereus.runtime.seam import StepReport
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible, Mode, TransitionDag
from nereus.transition.price import DeviceTable, Rates

CLUSTER = uniform_cluster(num_nodes=1, devices_per_node=6, accelerator=ACCELERATORS["cpu"])
TABLE, RATES = DeviceTable.of(CLUSTER), Rates.of(CLUSTER)


def transition_of(current: Plan, target: Plan, seconds: float) -> Transition:
    """A transition that is said to take so long; what it would do is left out."""
    return Transition(TransitionDag(current, target, Mode.SHADOW), TABLE, RATES, seconds)


def plan_on(*devices: int) -> Plan:
    """Actor training and generation together, one unit a device."""
    text = f"d{len(devices)}@{','.join(map(str, devices))}"
    return Plan.parse({"actor-training": text, "actor-generation": text})


def lengths(mean: float = 100.0) -> LengthSummary:
    return LengthSummary(mean=mean, p95=2 * mean, longest=3 * mean, prompt_mean=20.0)


def report(step: int, step_s: float, mean: float = 100.0) -> StepReport:
    return StepReport(step, 0, {}, step_s, {}, lengths(mean))


@dataclasses.dataclass
class TableOutlook(Outlook):
    """A step takes work * mean length / devices ** power; only the plan on all given devices is ever offered.

    learned: measured over predicted seconds of the last step, which predictions follow (but not frozen ones).
    """

    work: float = 0.04
    power: float = 1.0
    transition_s: float = 1.0
    infeasible: frozenset[Plan] = frozenset()
    extra: tuple[Plan, ...] = ()
    bytes_per_token: float = 0.0
    learned: float = 1.0
    frozen: float = 1.0
    searches: int = 0
    engine_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    cluster: Cluster = CLUSTER

    def predict(self, plan, lengths, *, frozen=False):
        step_s = self.work * lengths.mean / len(plan.devices) ** self.power
        share = self.bytes_per_token * lengths.longest / len(plan.devices)
        return Prediction(step_s * (self.frozen if frozen else self.learned), share)

    def plans(self, current, lengths, devices):
        self.searches += 1
        found = [plan_on(*devices), *self.extra] if devices else []
        fits = [plan for plan in found if self.predict(plan, lengths).memory_share <= 1]
        return sorted(fits, key=lambda plan: self.predict(plan, lengths).step_s)

    def assess(self, current, target):
        if target in self.infeasible:
            return Infeasible("device 0 has no room")
        return transition_of(current, target, self.transition_s if target != current else 0.0)

    def learn(self, plan, report):
        self.learned *= report.step_s / self.predict(plan, report.lengths).step_s

    def occupy(self, engine_bytes):
        self.engine_bytes = engine_bytes

    def recluster(self, cluster):
        self.cluster = cluster

    def freeze(self):
        self.frozen = self.learned


@dataclasses.dataclass
class JudgedOutlook(TableOutlook):
    """Judges transitions of a real job; all else is the table's."""

    judge: Callable[[Plan], Transition] | None = None

    def assess(self, current, target):
        assert self.judge is not None
        return self.judge(target)
