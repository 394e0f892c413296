"""The learning rate over the updates."""

import math

import pytest

from nereus.algorithms.schedule import LearningRate
from nereus.errors import ConfigError


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rate = LearningRate(peak=0.4, warmup_updates=4)
    assert [rate.at(update) for update in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_linear_decay_ends_at_the_lowest_rate_and_stays_there() -> None:
    rate = LearningRate(peak=1.0, warmup_updates=2, total_updates=6, decay="linear", min_ratio=0.2)
    assert [rate.at(u) for u in range(9)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_a_cosine() -> None:
    rate = LearningRate(peak=2.0, total_updates=10, decay="cosine")
    assert [rate.at(u) for u in range(12)] == pytest.approx(
        [1 + math.cos(math.pi * min(u, 10) / 10) for u in range(12)]
    )


def test_without_a_decay_the_rate_is_constant() -> None:
    assert {LearningRate(peak=3e-4).at(update) for update in (0, 1, 10**6)} == {3e-4}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"decay": "exponential"}, r"actor\.lr_scheduler_type: .*constant, linear, cosine"),
        ({"peak": -1.0}, r"actor\.lr: .*-1"),
        ({"peak": math.nan}, r"actor\.lr: .*nan"),
        ({"min_ratio": 2.0}, r"actor\.min_lr_ratio: must be in \[0, 1\]"),
        ({"warmup_updates": -1}, r"actor\.lr_warmup_steps: must not be negative"),
        ({"warmup_updates": 5, "total_updates": 5, "decay": "linear"}, r"actor\.lr_warmup_steps: .*there are 5"),
    ],
)
def test_a_setting_that_makes_no_schedule_is_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LearningRate(**{"peak": 1.0, "key": "actor", **settings})  # type: ignore[arg-type]
