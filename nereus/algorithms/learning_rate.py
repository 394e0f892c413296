"""The learning rate as a pure function of the number of updates done, so that it resumes wherever the counters do."""

import dataclasses
import math
from collections.abc import Callable

from nereus.recipe.sections import OptimizerConfig

__all__ = ["DECAYS", "LearningRate"]

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""From the progress of the decay, 0 to 1, to the share of the way between lowest and peak rate."""


@dataclasses.dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up to `peak` over `warmup_updates`, then a decay that ends at min_ratio x peak.

    total_updates: the updates of the whole run, warm-up included, at which the decay ends; a run that is shorter than
    the warm-up has no decay.
    """

    peak: float
    warmup_updates: int = 0
    total_updates: int = 0
    decay: str = "constant"
    min_ratio: float = 0.0

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, *, num_steps: int, updates_per_step: int) -> "LearningRate":
        """The schedule of a run of num_steps RL steps; `lr_warmup_steps` counts RL steps too."""
        return cls(
            peak=optimizer.lr,
            warmup_updates=optimizer.lr_warmup_steps * updates_per_step,
            total_updates=num_steps * updates_per_step,
            decay=optimizer.lr_decay,
            min_ratio=optimizer.min_lr_ratio,
        )

    def __call__(self, num_updates: int) -> float:
        """The rate of the update that follows `num_updates` others. The first one of a warm-up moves already."""
        if num_updates < self.warmup_updates:
            return self.peak * (num_updates + 1) / self.warmup_updates
        length = max(self.total_updates - self.warmup_updates, 1)
        progress = min((num_updates - self.warmup_updates) / length, 1.0)
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * DECAYS[self.decay](progress))
