"""A picture of a run as SVG: reward, response length, devices, and where the plan changed. Made from its two files."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from nereus.plan import Plan
from nereus.reports.events import read_events, read_lines

WIDTH, LEFT, RIGHT = 880, 70, 20
PANEL, GAP, TOP, BOTTOM = 120, 34, 46, 40
INK, GREY = "#222", "#8a8a8a"
COLOURS = {"reward": "#1f6feb", "held-out": "#d1242f", "length": "#1a7f37", "plan": "#1f6feb", "supply": "#d0d7de"}
VERDICT_COLOURS = {"admit": "#1a7f37", "urgent": "#d1242f", "asked for": "#9a6700"}

SMALLEST_SPAN = 1e-12
"""Values nearer to each other than this are drawn as one."""

Point = tuple[float, float]


def run_figure(folder: Path) -> str:
    """The SVG text of a run folder; raises DataError where its files are missing."""
    events = read_events(folder / "events.jsonl")
    rows = read_lines(folder / "metrics.jsonl")
    steps = [row for row in rows if "train/reward/mean" in row]
    held_out = [(row["step"], row["val/reward/mean"]) for row in rows if "val/reward/mean" in row]
    last = max((int(row["step"]) for row in rows), default=1)
    across = _scale(0, max(last, 1), LEFT, WIDTH - RIGHT)
    panels = [
        _lines_panel(
            "reward",
            across,
            0,
            [
                ("reward", "training batch", [(row["step"], row["train/reward/mean"]) for row in steps], False),
                ("held-out", "held-out", held_out, True),
            ],
        ),
        _lines_panel(
            "response tokens",
            across,
            1,
            [("length", "mean", [(row["step"], row["response_length/mean"]) for row in steps], False)],
        ),
        _devices_panel(events, across, 2, last),
    ]
    height = TOP + 3 * PANEL + 2 * GAP + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_changes(events, across, height - BOTTOM),
        *panels,
        *_step_axis(across, last, height - BOTTOM),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)


def _frame(title: str, index: int) -> tuple[float, float, str]:
    """(top, bottom, title text) of a panel."""
    top = TOP + index * (PANEL + GAP)
    text = f'<text x="{LEFT}" y="{top - 8}" fill="{INK}" font-weight="bold">{escape(title)}</text>'
    return top, top + PANEL, text


def _ticks(values: Sequence[float], up: Callable[[float], float]) -> list[str]:
    parts: list[str] = []
    for value in values:
        y = up(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{value:g}</text>')
    return parts


def axis_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, at most seven, that span the values and 0; steps are 1, 2 or 5 times a power of ten."""
    low, high = min([0.0, *values]), max([0.0, *values])
    if high - low < SMALLEST_SPAN:
        high = low + 1.0
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * (1 - 1e-9))
    return [float(f"{step * i:.12g}") for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _lines_panel(
    title: str, across: Callable[[float], float], index: int, series: Sequence[tuple[str, str, list[Point], bool]]
) -> str:
    """A panel of lines; series: (colour, label, points, whether each point is marked)."""
    top, bottom, text = _frame(title, index)
    drawn = [
        (colour, label, [p for p in points if math.isfinite(p[1])], marked) for colour, label, points, marked in series
    ]
    ticks = axis_ticks([y for _, _, points, _ in drawn for _, y in points])
    up = _scale(ticks[0], ticks[-1], bottom, top)
    parts = [text, *_ticks(ticks, up)]
    for place, (colour, label, points, marked) in enumerate(drawn):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[colour]}" stroke-width="2"/>')
        if marked:
            parts += [
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="4" fill="{COLOURS[colour]}"/>' for x, y in points
            ]
        x = LEFT + 110 + 130 * place
        parts.append(f'<text x="{x}" y="{top - 8}" fill="{COLOURS[colour]}">{escape(label)}</text>')
    return "\n".join(parts)


def _devices_panel(events: Sequence[Mapping[str, Any]], across: Callable[[float], float], index: int, last: int) -> str:
    """Devices offered (grey) and used (blue) by step."""
    top, bottom, text = _frame("devices", index)
    supplied = _by_step(events, "supply", lambda line: len(line["devices"]), last)
    used = _by_step(events, "step", lambda line: len(Plan.from_json(line["plan"]).devices), last)
    highest = max([*supplied, *used, 1])
    up = _scale(0, highest, bottom, top)
    parts = [text, *_ticks(list(range(0, highest + 1, max(1, highest // 4))), up)]
    for name, label, counts, height in (("supply", "offered", supplied, 1.0), ("plan", "used by the plan", used, 0.6)):
        inset = (across(1) - across(0)) * (1 - height) / 2
        for step, count in enumerate(counts, start=1):
            x, width = across(step - 1) + inset, across(step) - across(step - 1) - 2 * inset
            y = up(count)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{bottom - y:.1f}" fill="{COLOURS[name]}"/>'
            )
        x = LEFT + 110 + 130 * (name == "plan")
        parts.append(f'<text x="{x}" y="{top - 8}" fill="{GREY if name == "supply" else COLOURS[name]}">{label}</text>')
    return "\n".join(parts)


def _by_step(
    events: Sequence[Mapping[str, Any]], kind: str, value: Callable[[Mapping[str, Any]], int], last: int
) -> list[int]:
    """The value in force at each step from 1."""
    at = {int(line["step"]): value(line) for line in events if line["type"] == kind}
    result, current = [], at[min(at)] if at else 0
    for step in range(1, last + 1):
        current = at.get(step, current)
        result.append(current)
    return result


def _changes(events: Sequence[Mapping[str, Any]], across: Callable[[float], float], bottom: float) -> list[str]:
    """A line and a word where the plan changed."""
    decisions = [line for line in events if line["type"] == "decision" and line["action"] != "keep"]
    verdicts = {line["step"]: line["verdict"] for line in decisions}
    parts: list[str] = []
    for line in events:
        if line["type"] != "transition":
            continue
        word = verdicts.get(line["step"], "asked for")
        x, colour = across(line["step"] - 1), VERDICT_COLOURS[word]
        stroke = f'stroke="{colour}" stroke-dasharray="4 3"'
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 24}" y2="{bottom}" {stroke}/>')
        label = f"{word}: {line['bytes_moved'] / 1e6:.0f} MB, {line['seconds']:.2f} s"
        anchor, shift = ("end", -4) if x > WIDTH * 0.8 else ("start", 4)
        parts.append(f'<text x="{x + shift:.1f}" y="{TOP - 28}" fill="{colour}" text-anchor="{anchor}">{label}</text>')
    return parts


def _step_axis(across: Callable[[float], float], last: int, bottom: float) -> list[str]:
    every = max(1, last // 8)
    labels = [
        f'<text x="{across(s):.1f}" y="{bottom + 18}" text-anchor="middle" fill="{GREY}">{s}</text>'
        for s in range(0, last + 1, every)
    ]
    return [*labels, f'<text x="{WIDTH - RIGHT}" y="{bottom + 34}" text-anchor="end" fill="{GREY}">RL step</text>']
