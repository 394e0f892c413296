"""What a person sees while a run goes on: a live view on a terminal, a line a step elsewhere.

Both are told the same three things: which phase the run is in, how far the phase is, and events.
"""

import abc
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nereus.plan import AXES, Plan, format_devices
from nereus.reports.events import (
    Decision,
    Evaluation,
    Event,
    Start,
    StepEnd,
    SupplyChange,
    TransitionEnd,
    TransitionFailed,
)
from nereus.transition.operations import TransitionReport

RECENT_STEPS = 8
RECENT_CHANGES = 4
CONTROLLER_PHASES = ("step", "evaluating after step", "moving to another plan before step")
"""Phases that end with an event; where every event is a line, they are not lines of their own."""


class View(abc.ABC):
    """Told of a run from the thread that runs it."""

    @abc.abstractmethod
    def phase(self, what: str, *, done: int = 0, total: int = 0) -> None:
        """The run is busy with `what`; `done` of `total` where that is known. Called again as it advances."""

    @abc.abstractmethod
    def event(self, event: Event) -> None:
        """Something happened."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Something people should know that is no event of the run; shown once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Lines(View):
    """One line an event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def phase(self, what: str, *, done: int = 0, total: int = 0) -> None:
        if what in CONTROLLER_PHASES:
            return
        tenth = f" {10 * (10 * done // total)}%" if total else ""
        if what + tenth != self._last:
            self._last = what + tenth
            self._print(f"{what}{tenth}")

    def event(self, event: Event) -> None:
        text = describe(event)
        if text:
            self._print(text)

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        """As it is: what comes from outside is never markup."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


class LiveView(View):
    """A view that redraws in place: phase, recent steps, held-out reward, the plan as a map of devices."""

    def __init__(self, console: Console) -> None:
        self._steps: deque[StepEnd] = deque(maxlen=RECENT_STEPS)
        self._evaluations: list[Evaluation] = []
        self._changes: deque[Event] = deque(maxlen=RECENT_CHANGES)
        self._notes: list[str] = []
        self._plan: Plan | None = None
        self._phase: tuple[str, int, int] = ("starting", 0, 0)
        self._spinner = Spinner("dots")
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, what: str, *, done: int = 0, total: int = 0) -> None:
        self._phase = (what, done, total)

    def event(self, event: Event) -> None:
        if isinstance(event, Start):
            self._plan = event.plan
        elif isinstance(event, StepEnd):
            self._steps.append(event)
            self._plan = event.plan
        elif isinstance(event, Evaluation):
            self._evaluations.append(event)
        elif describe(event):
            self._changes.append(event)
        if isinstance(event, TransitionEnd):
            self._plan = event.after

    def note(self, text: str) -> None:
        self._notes.append(text)

    def _render(self) -> RenderableType:
        what, done, total = self._phase
        head = Table.grid(padding=(0, 1))
        bar: RenderableType = ProgressBar(total=total, completed=done, width=30) if total else Text("")
        head.add_row(self._spinner, Text(what, style="bold"), Text(f"{done}/{total}" if total else ""), bar)
        parts: list[RenderableType] = [head]
        if self._plan is not None:
            parts.append(Panel(device_map(self._plan), title="plan: devices by model-stage", title_align="left"))
        parts += [Text(describe(event), style="cyan") for event in self._changes]
        parts += [Text(note, style="yellow") for note in self._notes]
        if self._steps:
            parts.append(step_table(self._steps))
            parts += [Text(f"step {event.step}: {problem}", style="red") for event in self._steps
                      if (problem := reward_problem(event))][-1:]  # fmt: skip
        if self._evaluations:
            parts.append(Text(_evaluations(self._evaluations), style="green"))
        return Group(*parts)


def device_map(plan: Plan) -> Table:
    """A row a model-stage, a column a device: which unit and rank sits there."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("")
    for device in plan.devices:
        table.add_column(str(device), justify="center", header_style="dim")
    for index, (model_stage, stage_plan) in enumerate(plan.stages):
        colour = ("cyan", "yellow", "magenta", "green", "blue", "red")[index % 6]
        cells = [Text("·", style="dim") for _ in plan.devices]
        for column, device in enumerate(plan.devices):
            position = stage_plan.position(device)
            if position is not None:
                unit, rank = position
                layout = stage_plan.layout
                cut = [axis for axis, size in layout.axes.items() if size > 1]
                name = f"u{unit}" + "".join(f"{AXES[axis]}{layout.along(axis, rank)}" for axis in cut)
                cells[column] = Text(name, style=colour)
        shared = " (shares training's weights)" if plan.shares_weights(model_stage) else ""
        table.add_row(Text(model_stage.name, style=colour), Text(stage_plan.shape + shared, style="dim"), *cells)
    return table


def step_table(steps: deque[StepEnd]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    for name in ("step", "reward", "KL", "length", "tokens/s", "seconds"):
        table.add_column(name, justify="right")
    for event in steps:
        m = event.report.metrics
        table.add_row(
            str(event.step),
            f"{m['train/reward/mean']:.3f}",
            f"{m.get('actor/reward_kl_penalty', m.get('actor/ppo_kl', 0.0)):.4f}",
            f"{m['response_length/mean']:.1f}",
            f"{m['perf/throughput']:.0f}",
            f"{event.report.step_s:.2f}",
        )
    return table


def _evaluations(evaluations: list[Evaluation]) -> str:
    rows = [
        f"{e.step}: {e.metrics['val/reward/mean']:.3f} ({e.metrics['val/response_length/mean']:.1f} tokens)"
        for e in evaluations
    ]
    return "held-out reward at step " + ", ".join(rows)


def describe(event: Event) -> str:
    """One line that says what happened, or an empty one. A step whose rewards failed says why."""
    if isinstance(event, StepEnd):
        m = event.report.metrics
        kl = m.get("actor/reward_kl_penalty", m.get("actor/ppo_kl", 0.0))
        return (
            f"step {event.step}: reward {m['train/reward/mean']:.3f}, KL {kl:.4f}, "
            f"length {m['response_length/mean']:.1f}, {m['perf/throughput']:.0f} tokens/s, {event.report.step_s:.2f} s"
            + (f"; {problem}" if (problem := reward_problem(event)) else "")
        )
    if isinstance(event, Evaluation):
        m = event.metrics
        return (
            f"held-out reward after step {event.step}: {m['val/reward/mean']:.3f}, "
            f"length {m['val/response_length/mean']:.1f} ({m['val/num_samples']:.0f} prompts)"
        )
    if isinstance(event, SupplyChange):
        return f"supply before step {event.step}: devices {format_devices(event.devices)}{_announced(event)}"
    if isinstance(event, Decision):
        unchanged = event.again and event.action == "keep"
        return "" if unchanged else f"{event.verdict} before step {event.step}: {event.reason}"
    if isinstance(event, TransitionFailed):
        return f"transition before step {event.step} did not happen: {event.reason}"
    if isinstance(event, TransitionEnd):
        return f"transition before step {event.step}: {_moved(event.report)}; {_changes(event.before, event.after)}"
    return ""


def reward_problem(event: StepEnd) -> str:
    """How many of a step's reward calls came to nothing and why the first did; empty where none did."""
    report = event.report
    if report.reward_problem is None:
        return ""
    num_lost = report.metrics["reward/num_failed"] + report.metrics["reward/num_late"]
    return f"the reward function failed for {num_lost:.0f} responses, first with {report.reward_problem}"


def _announced(event: SupplyChange) -> str:
    return f"; a change is announced in {event.deadline_s:.0f} s" if event.deadline_s is not None else ""


def _moved(report: TransitionReport) -> str:
    return f"{report.bytes_moved / 1e6:.2f} MB in {report.seconds:.2f} s, {report.mode}"


def _changes(before: Plan, after: Plan) -> str:
    changed = [
        f"{m.name} {before.get(m)} -> {after.get(m)}"
        for m in dict.fromkeys(before.model_stages + after.model_stages)
        if before.get(m) != after.get(m)
    ]
    return ", ".join(changed) or "nothing changed"
