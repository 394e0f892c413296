"""The tables printed when a run has ended. Numbers come from the run's own rows and events."""

import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

from nereus.reports.events import Decision, Event, TransitionEnd

WINDOW_STEPS = 5
"""Steps before and after a transition whose median is shown."""

Rows = Sequence[Mapping[str, float]]


def evaluation_table(evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> Table:
    """Held-out reward and length, from what to what."""
    table = Table(title="held-out prompts", title_justify="left")
    for name in ("step", "reward", "length (tokens)", "prompts"):
        table.add_column(name, justify="right")
    for step, metrics in evaluations:
        table.add_row(
            str(step),
            f"{metrics['val/reward/mean']:.3f}",
            f"{metrics['val/response_length/mean']:.1f}",
            f"{metrics['val/num_samples']:.0f}",
        )
    first, last = evaluations[0][1], evaluations[-1][1]
    gain = last["val/reward/mean"] - first["val/reward/mean"]
    factor = last["val/response_length/mean"] / max(first["val/response_length/mean"], 1e-9)
    table.caption = f"reward {gain:+.3f}, length x{factor:.2f}"
    return table


def change_table(changes: Sequence[Event], rows: Rows) -> Table | None:
    """Every transition: why, what moved, and the median step before and after beside the prediction."""
    transitions = [change for change in changes if isinstance(change, TransitionEnd)]
    if not transitions:
        return None
    decisions = {d.step: d for d in changes if isinstance(d, Decision) and d.action != "keep"}
    step_s = {int(row["step"]): row["timing_s/step"] for row in rows if "timing_s/step" in row}
    table = Table(title=f"transitions (step seconds: medians of {WINDOW_STEPS} steps)", title_justify="left")
    for name in ("before step", "why", "MB", "seconds", "step before", "step after", "predicted"):
        table.add_column(name, justify="left" if name == "why" else "right")
    for index, transition in enumerate(transitions):
        last = transitions[index + 1].step if index + 1 < len(transitions) else None
        first = transitions[index - 1].step if index else 1
        decision = decisions.get(transition.step)
        predicted = decision.numbers.target_s if decision is not None and decision.numbers is not None else None
        table.add_row(
            str(transition.step),
            decision.verdict if decision is not None else "asked for",
            f"{transition.report.bytes_moved / 1e6:.2f}",
            f"{transition.report.seconds:.2f}",
            _median(step_s, max(first, transition.step - WINDOW_STEPS), transition.step),
            _median(
                step_s, transition.step, min(last or transition.step + WINDOW_STEPS, transition.step + WINDOW_STEPS)
            ),
            f"{predicted:.2f}" if predicted is not None else "-",
        )
    return table


def _median(step_s: Mapping[int, float], first: int, stop: int) -> str:
    """Median seconds of steps first to stop - 1."""
    found = [step_s[step] for step in range(first, stop) if step in step_s]
    return f"{statistics.median(found):.2f}" if found else "-"


def controller_share(rows: Rows) -> str:
    """What deciding cost beside what the steps took."""
    steps = [row for row in rows if "timing_s/step" in row]
    decided, ran = (sum(row.get(name, 0.0) for row in steps) for name in ("timing_s/decision", "timing_s/step"))
    moved = sum(row["timing_s/transition"] for row in steps)
    return (
        f"deciding took {1e3 * decided / max(len(steps), 1):.1f} ms a step ({decided / ran:.2%} of the steps), "
        f"transitions {moved:.2f} s in all ({moved / ran:.2%})"
    )
