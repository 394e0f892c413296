"""The workload of one RL step: how many samples, how long their prompts and responses are."""

import dataclasses
import functools
import math
import statistics


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A response length distribution as equally likely quantiles, ascending, in tokens.

    `values` of n entries stand for n equal shares of the samples; the last is the longest seen or allowed.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values and all(a <= b for a, b in zip(self.values, self.values[1:], strict=False))

    @property
    def mean(self) -> float:
        return _moments(self.values)[0]

    @property
    def longest(self) -> float:
        return self.values[-1]

    @classmethod
    def constant(cls, tokens: float) -> "Lengths":
        return cls((tokens,))

    @property
    def mean_square(self) -> float:
        return _moments(self.values)[1]

    @property
    def deviation(self) -> float:
        """Standard deviation, in tokens."""
        return math.sqrt(max(0.0, self.mean_square - self.mean**2))

    def longest_of(self, count: float, *, among: float) -> float:
        """Sum of the `count` longest of `among` samples; each value stands for an equal share of them."""
        share = among / len(self.values)
        total = 0.0
        for value in reversed(self.values):
            taken = min(share, count)
            total += taken * value
            count -= taken
            if count <= 0:
                break
        return total

    def scaled(self, mean: float, *, cap: float) -> "Lengths":
        """The same shape with another mean, cut at `cap`."""
        factor = mean / self.mean
        return Lengths(tuple(min(value * factor, cap) for value in self.values))


@functools.lru_cache(maxsize=256)
def _moments(values: tuple[float, ...]) -> tuple[float, float]:
    """(mean, mean square)."""
    return sum(values) / len(values), sum(value * value for value in values) / len(values)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One step: `batch` prompts, each sampled `n` times; `mini_batches` updates in each of `epochs` epochs.

    max_tokens: prompt and response that a sequence may reach, however short those counted are; None: no more.
    """

    batch: int
    prompt_tokens: float
    response: Lengths
    n: int = 1
    mini_batches: int = 1
    epochs: int = 1
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None

    @property
    def num_samples(self) -> int:
        return self.batch * self.n

    @property
    def mini_batch_samples(self) -> int:
        """Samples of the largest mini-batch. The engine cuts a batch into contiguous shares that differ by one sample
        at most (`algorithms.buffer.shares`), and each of those over the units: where they do not divide, the largest
        share of the largest share is priced, in seconds and in bytes."""
        return -(-self.num_samples // self.mini_batches)

    @property
    def mean_tokens(self) -> float:
        """Prompt plus response of the mean sample."""
        return self.prompt_tokens + self.response.mean

    @property
    def longest_tokens(self) -> float:
        return (self.max_prompt_tokens or self.prompt_tokens) + self.response.longest

    @property
    def cap_tokens(self) -> float:
        """Prompt plus response of the longest sequence that may come."""
        return max(self.max_tokens or 0, self.longest_tokens)

    @property
    def again_tokens(self) -> float:
        """Tokens of a sequence that may have to be prefilled again: the longest, where it outgrows those counted."""
        return self.cap_tokens if self.cap_tokens > self.longest_tokens else 0


NUM_QUANTILES = 20
"""Equal shares into which `LengthSummary.quantiles` cuts the samples of a step."""

P95 = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class LengthSummary:
    """Response lengths of one step in tokens, and the mean prompt.

    shortest and cut_share (of the responses, those that the length limit ended) are of measured steps alone.
    """

    mean: float
    p95: float
    longest: float
    prompt_mean: float
    shortest: float = 0.0
    cut_share: float = 0.0

    def quantiles(self) -> Lengths:
        """A distribution with this mean and this longest sample, near this p95.

        Of equal shares the last is the longest; below it a power k of the share, p95 (u / 0.95)^k, whose integral
        0.95 p95 / (k + 1) is what the mean leaves for it, then scaled so that the mean is met.
        """
        left = self.mean - self.longest / NUM_QUANTILES
        exponent = max(0.0, P95 * self.p95 / left - 1) if left > 0 else float(NUM_QUANTILES)
        body = [self.p95 * ((i + 0.5) / NUM_QUANTILES / P95) ** exponent for i in range(NUM_QUANTILES - 1)]
        scale = left * NUM_QUANTILES / sum(body) if left > 0 else 1.0
        return Lengths((*(max(1.0, min(value * scale, self.longest)) for value in body), self.longest))


MAX_SEGMENTS = 16
"""Pieces into which the length distribution of a generation is cut."""


def slowest_mean(work: Workload, unit_samples: int, dp: int) -> float:
    """Expected largest mean response length among `dp` units of random samples (normal order statistic, Blom 1958)."""
    mean = work.response.mean
    if dp == 1:
        return mean
    quantile = statistics.NormalDist().inv_cdf((dp - 0.375) / (dp + 0.25))
    return min(mean + quantile * work.response.deviation / math.sqrt(unit_samples), work.response.longest)


@functools.lru_cache(maxsize=64)
def segments(values: tuple[float, ...]) -> list[tuple[float, float, float]]:
    """(from token, to token, share of the samples that reach it) pieces of a length distribution, in order."""
    size = len(values)
    ends = range(size) if size <= MAX_SEGMENTS else sorted({size * i // MAX_SEGMENTS for i in range(MAX_SEGMENTS)})
    chosen = [*ends] if size <= MAX_SEGMENTS else [*ends[1:], size - 1]
    result: list[tuple[float, float, float]] = []
    start, before = 0.0, 0
    for index in chosen:
        end = values[index]
        if end > start:
            reached = sum(min(max(value - start, 0.0), end - start) for value in values[before:]) / (end - start) / size
            result.append((start, end, reached))
        start, before = max(start, end), index
    return result
