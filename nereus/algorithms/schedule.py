"""The learning rate as a pure function of the number of updates done, so that it resumes wherever the counters do."""

import dataclasses
import math
from collections.abc import Callable

from nereus.errors import ConfigError

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

    total_updates: the update at which the decay ends, warm-up included; no decay is defined without it.
    key: the recipe section that an error names.
    """

    peak: float
    warmup_updates: int = 0
    total_updates: int = 0
    decay: str = "constant"
    min_ratio: float = 0.0
    key: str = "optim"

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ConfigError(f"{self.key}.lr_scheduler_type", f"is {self.decay!r}; valid: {', '.join(DECAYS)}")
        if not (self.peak >= 0 and math.isfinite(self.peak)):
            raise ConfigError(f"{self.key}.lr", f"must be finite and not negative, is {self.peak}")
        if not 0 <= self.min_ratio <= 1:
            raise ConfigError(f"{self.key}.min_lr_ratio", f"must be in [0, 1], is {self.min_ratio}")
        if self.warmup_updates < 0:
            raise ConfigError(f"{self.key}.lr_warmup_steps", f"must not be negative, is {self.warmup_updates}")
        if self.decay != "constant" and self.total_updates <= self.warmup_updates:
            problem = f"is {self.warmup_updates}; a {self.decay} decay needs more updates than that, there are"
            raise ConfigError(f"{self.key}.lr_warmup_steps", f"{problem} {self.total_updates}")

    def at(self, update: int) -> float:
        """The rate of an update, counted from 0. The first one of a warm-up already moves: 1 / warmup_updates."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        if self.decay == "constant":
            return self.peak
        progress = min((update - self.warmup_updates) / (self.total_updates - self.warmup_updates), 1.0)
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * DECAYS[self.decay](progress))
