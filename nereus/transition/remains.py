"""What is left of a plan after a failure: which units are whole, and the plan that these make. Pure."""

import dataclasses
from collections.abc import Mapping

from nereus.errors import TransitionAborted
from nereus.plan import ModelStage, Plan, Stage, StagePlan
from nereus.transition.operations import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Remains:
    """What is left of the plan in force where not all of it is whole.

    before: the plan in force. whole: the units that can be used as they are, of each model-stage that has any and holds
    buffers of its own; of the layout of `before` where that has a whole unit, else of another that was being built.
    lost: devices whose worker does not answer, and whose state is gone with it. problems: what failed, in order.
    """

    before: Plan
    whole: tuple[tuple[ModelStage, StagePlan], ...]
    lost: frozenset[int]
    problems: tuple[str, ...]

    @property
    def plan(self) -> Plan | None:
        """What the whole units make: the plan in force less its broken units; None where a model-stage has none.

        A model-stage that shares the parameters of its role's training, or has lost its own, uses those in place.
        """
        whole, stages = dict(self.whole), dict[ModelStage, StagePlan]()
        for model_stage, stage_plan in self.before.stages:
            shares = self.before.holder(model_stage) != model_stage
            found = None if shares else whole.get(model_stage)
            found = found or whole.get(ModelStage(model_stage.role, Stage.TRAINING))
            if found is None:
                return None
            stages[model_stage] = dataclasses.replace(stage_plan, layout=found.layout, units=found.units)
        return Plan.of(stages)

    @property
    def missing(self) -> tuple[ModelStage, ...]:
        """Model-stages of which no whole unit is left, nor one of training that could take its place."""
        whole = dict(self.whole)
        return tuple(
            m for m in self.before.model_stages if m not in whole and ModelStage(m.role, Stage.TRAINING) not in whole
        )

    @property
    def broken(self) -> Mapping[ModelStage, tuple[Unit, ...]]:
        """Units of the plan in force that are not whole as they were."""
        whole = dict(self.whole)
        found: dict[ModelStage, tuple[Unit, ...]] = {}
        for m, stage_plan in self.before.stages:
            if self.before.holder(m) == m:
                left = whole[m].units if m in whole and whole[m].layout == stage_plan.layout else ()
                units = tuple(unit for unit in stage_plan.units if unit not in left)
                found |= {m: units} if units else {}
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the plan in force has all its units."""
        return not self.broken

    def __str__(self) -> str:
        units = "; ".join(
            f"{m} lacks {', '.join('+'.join(map(str, unit)) for unit in broken)}" for m, broken in self.broken.items()
        )
        why = f" ({'; '.join(self.problems)})" if self.problems else ""
        return f"{units}{why}"


class PlanBroken(TransitionAborted):
    """A transition failed and the plan in force is not whole any more; `remains` says what is.

    Nothing of it may be computed on until the runtime has fallen back to a plan of whole units.
    """

    def __init__(self, operation: str, problem: str, remains: Remains) -> None:
        super().__init__(operation, f"{problem}; not whole: {remains}")
        self.remains = remains

    def __reduce__(self) -> tuple[type["PlanBroken"], tuple[object, ...]]:
        return PlanBroken, (self.operation, self.problem, self.remains)
