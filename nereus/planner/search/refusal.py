"""Why no plan fits, and what would: the binding limit in words a user can act on."""

import dataclasses
import math

import numpy as np

from nereus.cluster import GB
from nereus.plan import ModelStage, Stage
from nereus.planner.placement import Placement
from nereus.planner.prices.pricing import Pricing
from nereus.planner.space.candidates import Candidates


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """No plan fits. limit: what binds (`layout`, `devices`, `memory`, `plan`). valid: what would be valid instead."""

    limit: str
    reason: str
    valid: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason}; {'; '.join(self.valid)}" if self.valid else self.reason


def refuse(pricing: Pricing, placement: Placement) -> Refusal:
    """The binding limit of a problem for which nothing was found."""
    stages, line = pricing.workflow.model_stages, pricing.line
    unbounded = dataclasses.replace(pricing, line=line.with_capacity(1 << 60))
    tables = {m: unbounded.candidates(m, in_turn=placement is Placement.COLOCATED) for m in stages}
    for m, table in tables.items():
        if not len(table):
            valid = ", ".join(str(tp) for tp in pricing.specs[m.role].valid_tp if tp <= line.max_node)
            return Refusal("layout", f"{m} has no layout on {line.num_devices} devices", (f"valid tp: {valid}",))
    if placement is Placement.DISJOINT and (roles := len({m.role for m in stages})) > line.num_devices:
        reason = f"{roles} models need devices of their own under placement disjoint; {line.num_devices} given"
        return Refusal("devices", reason, ("placement free or colocated lets models share devices",))
    if placement is not Placement.COLOCATED:
        for stage in Stage:
            needed = sum(m.stage is stage for m in stages)
            if needed > line.num_devices:
                reason = (
                    f"{needed} model-stages of {stage} run at once and need a device each; {line.num_devices} given"
                )
                return Refusal("devices", reason, ("placement colocated lets them take turns",))
    return _memory(pricing, tables)


def _memory(pricing: Pricing, tables: dict[ModelStage, Candidates]) -> Refusal:
    """Which model-stage, or which sum of them, is too large for a device."""
    usable = pricing.line.max_capacity
    least: dict[ModelStage, tuple[int, str]] = {}
    for m, table in tables.items():
        row = int(np.argmin(np.minimum(table.active, table.shared_active)))
        least[m] = int(min(table.active[row], table.shared_active[row])), table[row].shape
    worst = max(least, key=lambda m: least[m][0])
    needed, shape = least[worst]
    if needed > usable:
        reason = (
            f"memory: {worst} needs at least {needed / GB:.1f} GB on a device (as {shape}, the leanest it can run) "
            f"and {usable / GB:.1f} GB are usable"
        )
        return Refusal("memory", reason, _larger(pricing, needed))
    held = sum(int(np.minimum(t.idle, t.shared_idle).min()) for t in tables.values())
    parts = ", ".join(f"{m} {least[m][0] / GB:.1f} GB as {least[m][1]}" for m in least)
    reason = (
        f"memory: each model-stage fits alone ({parts}) but no arrangement keeps the sum of what "
        f"shares a device within the usable {usable / GB:.1f} GB (idle state: {held / GB:.1f} GB at its leanest)"
    )
    return Refusal("memory", reason, _larger(pricing, usable + held))


def _larger(pricing: Pricing, needed: int) -> tuple[str, ...]:
    """What would lift a memory limit."""
    size = math.ceil(needed / (1 - pricing.line.headroom) / GB)
    return (
        f"valid: about {size} GB a device (or as --memory-gb) or more, more devices to split the models over, smaller "
        f"models, or shorter responses",
    )
