"""The picture of a run: whatever its numbers are, it can be drawn."""

import json
import math
import xml.etree.ElementTree
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import DataError
from nereus.reports.figure import axis_ticks, run_figure

FINITE = st.floats(-1e9, 1e9)


@settings(deadline=None)
@given(st.lists(FINITE, max_size=6))
def test_an_axis_spans_its_values_with_few_round_numbers(values: list[float]) -> None:
    ticks = axis_ticks(values)
    assert 2 <= len(ticks) <= 8 and ticks == sorted(ticks)
    slack = 1e-9 * (1 + max(map(abs, ticks)))
    assert ticks[0] - slack <= min([0.0, *values]) and max([0.0, *values]) <= ticks[-1] + slack


def draw(folder: Path, rewards: list[float], *, cut: str = "") -> str:
    rows = [
        {"step": step, "train/reward/mean": reward, "response_length/mean": 7.0}
        for step, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), cut]))
    (folder / "events.jsonl").write_text("")
    return run_figure(folder)


@pytest.mark.parametrize(
    "rewards",
    [[-3.0, -1.5, -0.2], [60_000.0, 90_000.0], [math.nan, 0.5], [math.inf], [], [0.0], [1e-9, 2e-9], [5e-324]],
    ids=str,
)
def test_any_rewards_can_be_drawn(rewards: list[float], tmp_path: Path) -> None:
    drawn = draw(tmp_path, rewards)
    xml.etree.ElementTree.fromstring(drawn)
    assert "nan" not in drawn and "inf" not in drawn


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    assert draw(tmp_path, [0.5], cut='{"step": 2, "train/rew') == draw(tmp_path, [0.5])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not found"):
        run_figure(tmp_path)
