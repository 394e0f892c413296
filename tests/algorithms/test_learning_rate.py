"""The learning rate over the updates."""

import math
import pickle

import pytest

from nereus.algorithms.learning_rate import LearningRate
from nereus.recipe.sections import OptimizerConfig


def rates(rate: LearningRate, num: int) -> list[float]:
    return [rate(update) for update in range(num)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates(LearningRate(peak=0.4, warmup_updates=4), 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_linear_decay_ends_at_the_lowest_rate_and_stays_there() -> None:
    rate = LearningRate(peak=1.0, warmup_updates=2, total_updates=6, decay="linear", min_ratio=0.2)
    assert rates(rate, 9) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_a_cosine() -> None:
    rate = LearningRate(peak=2.0, total_updates=10, decay="cosine")
    assert rates(rate, 12) == pytest.approx([1 + math.cos(math.pi * min(u, 10) / 10) for u in range(12)])


def test_without_a_decay_the_rate_is_constant() -> None:
    assert {LearningRate(peak=3e-4)(update) for update in (0, 1, 10**6)} == {3e-4}


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    rate = LearningRate(peak=1.0, warmup_updates=8, total_updates=4, decay="cosine")
    assert rates(rate, 4) == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_a_recipe_gives_its_schedule_and_the_schedule_travels_to_a_worker() -> None:
    optimizer = OptimizerConfig(lr=0.5, lr_warmup_steps=2, lr_decay="linear", min_lr_ratio=0.1)
    rate = LearningRate.from_config(optimizer, num_steps=12, updates_per_step=3)
    assert rate == LearningRate(peak=0.5, warmup_updates=6, total_updates=36, decay="linear", min_ratio=0.1)
    assert pickle.loads(pickle.dumps(rate)) == rate
