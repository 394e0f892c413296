"""A runtime without workers, for tests of what drives one: it does and fails as it is told, and remembers."""

from collections.abc import Callable, Collection, Iterable, Mapping

from nereus.cluster import Cluster
from nereus.errors import TransitionAborted
from nereus.plan import Plan
from nereus.runtime.seam import Runtime, StepReport
from nereus.transition.judged import Transition
from nereus.transition.operations import TransitionReport


class ScriptedRuntime(Runtime):
    """Steps, moves and pauses that only take time. `asked` says what was called, in order, with what.

    step: the report of an RL step on a plan. pass_by: lets seconds pass. failures: what the first transitions raise;
    one of None goes through, as do those after the last.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        step: Callable[[int, Plan], StepReport],
        *,
        pass_by: Callable[[float], None] = lambda seconds: None,
        transition_s: float = 0.0,
        resume_s: float = 0.0,
        failures: Iterable[TransitionAborted | None] = (),
    ) -> None:
        self._plan, self._cluster, self._step, self._pass_by = plan, cluster, step, pass_by
        self._transition_s, self._resume_s = transition_s, resume_s
        self._failures = list(failures)
        self._saved_step: int | None = None
        self.asked: list[tuple[object, ...]] = []

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    def run_step(self, step: int) -> StepReport:
        assert self._plan.stages, "suspended"
        self.asked.append(("step", step, len(self._plan.devices)))
        done = self._step(step, self._plan)
        self._pass_by(done.step_s)
        return done

    def evaluate(self) -> Mapping[str, float]:
        return {}

    def transition(self, transition: Transition) -> TransitionReport:
        target = transition.target
        assert transition.current == self._plan != target
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            self.asked.append(("aborted", target))
            raise failure
        self.asked.append(("transition", target))
        self._plan = target
        self._pass_by(self._transition_s)
        return TransitionReport((), "shadow", 0, 0, self._transition_s, True)

    def fall_back(self, plan: Plan, *, lost: Collection[int]) -> None:
        self.asked.append(("fall back", plan, frozenset(lost)))
        self._plan = plan

    @property
    def saved_step(self) -> int | None:
        return self._saved_step

    def suspend(self, step: int) -> None:
        self.asked.append(("suspend", step))
        self._plan, self._saved_step = Plan(()), step

    def resume(self, plan: Plan) -> None:
        assert self._saved_step is not None, "nothing was saved"
        self.asked.append(("resume", plan))
        self._plan = plan
        self._pass_by(self._resume_s)

    def close(self) -> None:
        self.asked.append(("close",))
