"""The main path of a run: decide, move, step, observe. It never asks which runtime it has.

    before each step:  what does the recipe, a person or the decider want? --> keep | move | restart | pause
                                                                                      |
    each step:         run one RL step --> learn --> evaluate where due   <-----------+

Everything that is decided on and done is told to the observer, in order, so that a record of it can be decided again.

State moves only here, between two steps. A move that is aborted leaves the job whole on the plan it had. Where that is
not so, the job goes on with the units that are whole; where a model-stage has none, from the last saved state.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from nereus.decide.decider import Decider
from nereus.decide.ruling import Action, Ruling, supply_event
from nereus.decide.seam import Outlook
from nereus.errors import ClusterError, PlanError, StateLost, TransitionAborted
from nereus.plan import Plan
from nereus.reports.control import Requests
from nereus.reports.events import Evaluation, Event, StepEnd, TransitionEnd, TransitionFailed
from nereus.runtime.seam import Runtime, StepReport
from nereus.supply.supply import Supply, SupplyView
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible, TransitionReport
from nereus.transition.remains import PlanBroken, Remains

PAUSE_POLL_S = 0.25
"""How often a paused run looks at its supply."""


class Observer(Protocol):
    """Told of every event, in order, from the controller's thread."""

    def __call__(self, event: Event, /) -> None: ...


Progress = Callable[[str, int, int], None]
"""(what begins, step, steps)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What is to be run. transitions: {step: from the plan in force to the one wanted before that step}."""

    steps: int
    val_every: int
    transitions: Mapping[int, Callable[[Plan], Plan]]

    def evaluates_after(self, step: int) -> bool:
        return step in (0, self.steps) or (self.val_every > 0 and step % self.val_every == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """What time it is, in seconds into the run, and how to let some pass."""

    now_s: Callable[[], float]
    sleep: Callable[[float], None] = time.sleep


@dataclasses.dataclass(frozen=True, slots=True)
class Adapting:
    """What a run that adapts asks before each step: what devices there are, and what to do."""

    supply: Supply
    decider: Decider


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """What happened before a step. decision_s: what ruling took, moving not counted."""

    transition_s: float = 0.0
    decision_s: float = 0.0
    predicted_step_s: float | None = None


class Controller:
    """Drives one runtime through one course. Without `adapting` only the recipe and people change the plan.

    outlook: judges what those want; the decider asks the same one.
    """

    def __init__(
        self,
        runtime: Runtime,
        outlook: Outlook,
        course: Course,
        observer: Observer,
        *,
        progress: Progress,
        requests: Requests,
        clock: Clock,
        adapting: Adapting | None = None,
    ) -> None:
        self._runtime, self._outlook = runtime, outlook
        self._course, self._observe, self._progress = course, observer, progress
        self._requests, self._clock, self._adapting = requests, clock, adapting
        self._view: SupplyView | None = None
        self._step = 1

    def run(self) -> None:
        """Every step of the course, or until someone asks to stop; returns when the last is evaluated."""
        self._evaluate(0)
        while self._step <= self._course.steps:
            if self._requests.stop_wanted():
                return
            before = self._boundary(self._step)
            step = self._step
            self._progress("step", step, self._course.steps)
            report = self._runtime.run_step(step)
            learning_s = self._learn(report)
            self._observe(
                StepEnd(
                    step,
                    self._runtime.plan,
                    report,
                    transition_s=before.transition_s,
                    predicted_step_s=before.predicted_step_s,
                    decision_s=before.decision_s + learning_s,
                )
            )
            self._evaluate(step)
            self._step = step + 1

    def _boundary(self, step: int) -> Boundary:
        """Everything that may change the plan before a step: recipe and people first, then what adapts."""
        transition_s = sum(self._change(step, change) for change in self._wanted(step))
        if self._adapting is None:
            return Boundary(transition_s)
        decision_s = 0.0
        while True:
            begun = time.perf_counter()
            ruling = self._rule(step, self._adapting)
            decision_s += time.perf_counter() - begun
            transition_s += self._act(step, ruling)
            if not self._adapting.decider.paused:
                reached = ruling.target is None or self._runtime.plan == ruling.target
                return Boundary(transition_s, decision_s, ruling.predicted_step_s if reached else None)
            self._clock.sleep(PAUSE_POLL_S)

    def _rule(self, step: int, adapting: Adapting) -> Ruling:
        """What is to be done before `step`, by the devices as they are. While paused only a change of them asks."""
        view, decider = adapting.supply.at(self._clock.now_s()), adapting.decider
        cluster = self._runtime.cluster  # after the supply, which may have given ids to devices that joined
        regrouped = cluster if cluster != self._outlook.cluster else None
        if view != self._view or regrouped is not None:
            self._observe(supply_event(step, view, regrouped))
        elif decider.paused:
            return Ruling(step, None)
        self._view = view
        if regrouped is not None:
            decider.recluster(regrouped)
        ruling = decider.boundary(step, view)
        for event in ruling.events:
            self._observe(event)
        return ruling

    def _learn(self, report: StepReport) -> float:
        """Learn from a step that has ended; the seconds it took."""
        begun = time.perf_counter()
        if self._adapting is not None:
            self._adapting.decider.observe(report)
        else:
            self._outlook.occupy(report.engine_bytes)
        return time.perf_counter() - begun

    def _wanted(self, step: int) -> list[Callable[[Plan], Plan]]:
        """Changes that the recipe names for this step and that people asked for since the last."""
        named = self._course.transitions.get(step)
        return [*([named] if named else []), *self._requests.reshapes()]

    def _act(self, step: int, ruling: Ruling) -> float:
        """Carry out a ruling; the seconds it took."""
        begun = time.perf_counter()
        if ruling.action is Action.MOVE:
            assert ruling.transition is not None
            return self._move(step, ruling.transition)
        if ruling.action is Action.PAUSE and self._runtime.plan.stages:
            self._progress("saving state and pausing before step", step, self._course.steps)
            self._runtime.suspend(step - 1)
        elif ruling.action is Action.RESTART:
            assert ruling.target is not None
            self._restart(step, ruling.target)
        else:
            return 0.0
        return time.perf_counter() - begun

    def _restart(self, step: int, target: Plan) -> None:
        """From saved state: the last resort, and the way back from a pause."""
        assert self._adapting is not None
        self._progress("going on from saved state before step", step, self._course.steps)
        begun, before = time.perf_counter(), self._runtime.plan
        if before.stages:
            self._runtime.suspend(step - 1)
        self._runtime.resume(target)
        seconds = time.perf_counter() - begun
        report = TransitionReport(("restart",), "restart", 0, 0, seconds, verified=True)
        self._observe(TransitionEnd(step, before, target, report))
        self._adapting.decider.moved(target)

    def _change(self, step: int, change: Callable[[Plan], Plan]) -> float:
        """What a recipe or a person wants, judged as every move is; the seconds it took."""
        current = self._runtime.plan
        try:
            target = change(current)
        except PlanError as error:
            self._observe(TransitionFailed(step, current, None, str(error)))
            return 0.0
        if target == current:
            return 0.0
        found = self._outlook.assess(current, target)
        if isinstance(found, Infeasible):
            self._failed(step, target, found.reason)
            return 0.0
        if found.target == current:  # with the settings that it left open
            return 0.0
        return self._move(step, found)

    def _move(self, step: int, transition: Transition) -> float:
        """A live transition; the seconds it took. One that is aborted is told and changes nothing that is whole."""
        self._progress("moving to another plan before step", step, self._course.steps)
        try:
            report = self._runtime.transition(transition)
        except PlanBroken as broken:
            self._failed(step, transition.target, str(broken))
            return self._go_on(step, broken.remains)
        except (TransitionAborted, ClusterError) as error:
            self._failed(step, transition.target, str(error))
            return 0.0
        current, target, predicted_s = transition.current, transition.target, transition.seconds
        self._observe(TransitionEnd(step, current, target, report, predicted_s))
        if self._adapting is not None:
            self._adapting.decider.moved(target, seconds=report.seconds, predicted_s=predicted_s)
        return report.seconds

    def _go_on(self, step: int, remains: Remains) -> float:
        """With the units that are whole, or from the last saved state; the seconds it took to get there."""
        begun, before = time.perf_counter(), self._runtime.plan
        while (plan := remains.plan) is not None:
            self._progress("going on with what is whole before step", step, self._course.steps)
            try:
                self._runtime.fall_back(plan, lost=remains.lost)
            except PlanBroken as broken:
                remains = broken.remains
                continue
            seconds = time.perf_counter() - begun
            report = TransitionReport(("fall back",), "fall_back", 0, 0, seconds, verified=True)
            self._observe(TransitionEnd(step, before, plan, report))
            if self._adapting is not None:
                self._adapting.decider.fell_back(plan)
            return seconds
        return self._restore(step, before, remains)

    def _restore(self, step: int, plan: Plan, remains: Remains) -> float:
        """Go on from the last saved state, and so from an earlier step; raises StateLost where there is none."""
        saved, missing = self._runtime.saved_step, ", ".join(m.name for m in remains.missing)
        if saved is None:
            raise StateLost(f"before step {step} no whole copy of {missing} is left, and nothing was saved: {remains}")
        self._progress(f"no whole copy of {missing} is left; going on from the state saved after step", saved, step)
        begun = time.perf_counter()
        self._runtime.resume(plan)
        seconds = time.perf_counter() - begun
        report = TransitionReport(("restart",), "restart", 0, 0, seconds, verified=True)
        self._observe(TransitionEnd(step, plan, plan, report))
        if self._adapting is not None:
            self._adapting.decider.moved(plan)
        self._step = saved + 1
        return seconds

    def _failed(self, step: int, target: Plan, reason: str) -> None:
        self._observe(TransitionFailed(step, self._runtime.plan, target, reason))
        if self._adapting is not None:
            self._adapting.decider.aborted(target, step)

    def _evaluate(self, step: int) -> None:
        if self._course.evaluates_after(step):
            self._progress("evaluating after step", step, self._course.steps)
            metrics = self._runtime.evaluate()
            if metrics:
                self._observe(Evaluation(step, metrics))
