"""The algorithm's graph of model-stage tasks for one RL step. One definition, four readers.

The planner prices it, the runtime runs it, the simulator plays it, the report draws it.
"""

import dataclasses
import enum
from collections.abc import Collection

from nereus.errors import PlanError
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    ModelStage,
    Plan,
    Role,
)


class Kind(enum.StrEnum):
    """What a task does with its model-stage."""

    GENERATE = "generate"
    LOGPROBS = "logprobs"
    VALUES = "values"
    SCORES = "scores"
    UPDATE = "update"


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One task of a step. It starts when every task in `after` has ended."""

    name: str
    model_stage: ModelStage
    kind: Kind
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Workflow:
    """The tasks of one step in topological order, and the weight synchronizations at its end.

    syncs: (from, to) pairs; a pair whose model-stages share parameters under the plan costs nothing.
    max_staleness: updates by which the policy that generates may lag behind. From 1 on generation of the next batch
    runs beside the rest of this step, where it has devices of its own, and a step lasts from one synchronization to
    the next.
    """

    name: str
    tasks: tuple[Task, ...]
    syncs: tuple[tuple[ModelStage, ModelStage], ...]
    max_staleness: int = 0

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for task in self.tasks:
            assert task.name not in seen and seen.issuperset(task.after), f"{task.name} is not in topological order"
            seen.add(task.name)

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        return tuple(dict.fromkeys(task.model_stage for task in self.tasks))

    @property
    def waves(self) -> dict[str, int]:
        """Wave of each task: the length of the longest chain of tasks before it."""
        waves: dict[str, int] = {}
        for task in self.tasks:
            waves[task.name] = max((waves[before] + 1 for before in task.after), default=0)
        return waves

    def syncs_under(self, plan: Plan) -> tuple[tuple[ModelStage, ModelStage], ...]:
        """The synchronizations that move bytes under a plan."""
        return tuple((a, b) for a, b in self.syncs if plan.shares_weights(b) != a)

    def check_plan(self, plan: Plan) -> None:
        """Raise PlanError where the plan misses a model-stage or has one too many."""
        missing = [m.name for m in self.model_stages if m not in plan]
        extra = [m.name for m in plan.model_stages if m not in self.model_stages]
        if missing:
            raise PlanError(f"the plan names no devices for {', '.join(missing)}, which {self.name} needs")
        if extra:
            raise PlanError(f"the plan names {', '.join(extra)}, which {self.name} does not use")


ROLES_OF: dict[str, frozenset[Role]] = {
    "ppo": frozenset({Role.ACTOR, Role.CRITIC, Role.REFERENCE}),
    "grpo": frozenset({Role.ACTOR, Role.REFERENCE}),
    "remax": frozenset({Role.ACTOR, Role.REFERENCE}),
}
"""The roles that each algorithm may use. A run leaves the reference out where nothing of it weighs a KL divergence, and
adds the reward where a model scores."""


def step_workflow(name: str, roles: Collection[Role], *, max_staleness: int = 0) -> Workflow:
    """The step graph of an on-policy algorithm over the roles it uses.

    generate -> {old_logprobs, reference, reward, values} -> {critic_update, actor_update} -> synchronize.
    """
    tasks = [
        Task("generate", ACTOR_GENERATION, Kind.GENERATE),
        Task("old_logprobs", ACTOR_TRAINING, Kind.LOGPROBS, ("generate",)),
    ]
    if Role.REFERENCE in roles:
        tasks.append(Task("reference", REFERENCE_INFERENCE, Kind.LOGPROBS, ("generate",)))
    if Role.REWARD in roles:
        tasks.append(Task("reward", REWARD_INFERENCE, Kind.SCORES, ("generate",)))
    if Role.CRITIC in roles:
        tasks.append(Task("values", CRITIC_INFERENCE, Kind.VALUES, ("generate",)))
    ready = tuple(task.name for task in tasks[1:])
    syncs = [(ACTOR_TRAINING, ACTOR_GENERATION)]
    if Role.CRITIC in roles:
        tasks.append(Task("critic_update", CRITIC_TRAINING, Kind.UPDATE, ready))
        syncs.append((CRITIC_TRAINING, CRITIC_INFERENCE))
    tasks.append(Task("actor_update", ACTOR_TRAINING, Kind.UPDATE, ready))
    return Workflow(name, tuple(tasks), tuple(syncs), max_staleness)
