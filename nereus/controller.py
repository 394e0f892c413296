"""The main path of a run: decide, move, step, observe. It never asks which runtime it has.

    for each step: target plan for this boundary? -> transition -> run one RL step -> observe

Transitions a recipe names come first at their step; nothing else changes the plan here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from nereus.plan import Plan
from nereus.reports.events import Evaluation, Event, StepEnd, TransitionEnd
from nereus.runtime.base import Runtime


class Observer(Protocol):
    """Told of every event, in order, from the controller's thread."""

    def __call__(self, event: Event) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What is to be run. transitions: {step: model-stages that change before it}; val_every 0: only at both ends."""

    steps: int
    val_every: int
    transitions: Mapping[int, Callable[[Plan], Plan]]

    def evaluates_after(self, step: int) -> bool:
        return step in (0, self.steps) or (self.val_every > 0 and step % self.val_every == 0)


class Controller:
    """Drives one runtime through one course. `progress` is told what begins: (what, step, steps)."""

    def __init__(
        self, runtime: Runtime, course: Course, observer: Observer, progress: Callable[[str, int, int], None]
    ) -> None:
        self._runtime, self._course, self._observe, self._progress = runtime, course, observer, progress

    def run(self) -> None:
        """Every step of the course; returns when the last is committed and evaluated."""
        self._evaluate(0)
        for step in range(1, self._course.steps + 1):
            transition_s = self._adapt(step)
            self._progress("step", step, self._course.steps)
            report = self._runtime.run_step(step)
            self._observe(StepEnd(step, self._runtime.plan, report, transition_s=transition_s))
            self._evaluate(step)

    def _adapt(self, step: int) -> float:
        """Move to the plan this boundary asks for; seconds it took."""
        current = self._runtime.plan
        change = self._course.transitions.get(step)
        target = change(current) if change else current
        if target == current:
            return 0.0
        self._progress("moving to another plan before step", step, self._course.steps)
        report = self._runtime.transition(target)
        self._observe(TransitionEnd(step, current, target, report))
        return report.seconds

    def _evaluate(self, step: int) -> None:
        if self._course.evaluates_after(step):
            self._progress("evaluating after step", step, self._course.steps)
            metrics = self._runtime.evaluate()
            if metrics:
                self._observe(Evaluation(step, metrics))
