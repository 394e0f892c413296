"""What a plan is chosen from: one value that holds the job, the machine, what is known of it, and the limits."""

import dataclasses
import functools
from collections.abc import Mapping

from nereus.cluster import HEADROOM, Cluster
from nereus.engine_facts import Precision
from nereus.model import ModelSpec
from nereus.plan import Role
from nereus.planner.placement import Placement
from nereus.planner.prices.cost import CostModel
from nereus.planner.prices.pricing import Pricing
from nereus.planner.space.layouts import Space
from nereus.planner.space.line import Line, line_of
from nereus.planner.workload import Workload
from nereus.workflow import Workflow


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must respect beside the devices' own memory.

    memory_cap_bytes: a device counts as having no more than this. headroom: share of memory left free.
    turns_if_faster: `free` placement takes turns on shared devices where that is faster, not only where nothing else
    fits.
    """

    memory_cap_bytes: int | None = None
    headroom: float = HEADROOM
    placement: Placement = Placement.FREE
    turns_if_faster: bool = True
    space: Space = Space()


@dataclasses.dataclass(frozen=True)
class PlanningProblem:
    """Everything a plan is chosen from. `specs` by role; `cost` prices on `cluster`."""

    workflow: Workflow
    specs: Mapping[Role, ModelSpec]
    cluster: Cluster
    workload: Workload
    precision: Precision
    cost: CostModel
    limits: Limits = Limits()

    @functools.cached_property
    def line(self) -> Line:
        return line_of(self.cluster, self.limits.memory_cap_bytes, self.limits.headroom)

    @functools.cached_property
    def pricing(self) -> Pricing:
        return Pricing(
            self.workflow, dict(self.specs), self.workload, self.precision, self.cost, self.line, self.limits.space
        )

    def may_overlap(self, placement: Placement) -> bool:
        """Whether generation may run beside the rest of the step, on devices of its own."""
        return self.workflow.max_staleness > 0 and placement is not Placement.COLOCATED and self.line.num_devices > 1
