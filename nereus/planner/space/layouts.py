"""Which layouts, data-parallel counts, micro-batches and recomputations are candidates at all."""

import dataclasses
import functools
from collections.abc import Iterable

from nereus.model import ModelSpec
from nereus.plan import Recompute, Stage
from nereus.planner.space.line import Line


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Which layouts, dp, micro-batches and recomputations are tried.

    paper: tp and pp powers of two, and only dp and micro-batches that divide the batch. Otherwise tp is any divisor
    of the query heads up to a node, pp any number up to the layers, dp any count that gives the fullest unit fewer
    samples than every smaller count does, the micro-batch a power of two or all samples of a unit.
    recomputes: of training. micro_batch, max_num_seqs: the only one of training and inference, and of generation, where
    the user wants one; None where the planner chooses.
    """

    paper: bool = False
    recomputes: tuple[Recompute, ...] = tuple(Recompute)
    micro_batch: int | None = None
    max_num_seqs: int | None = None

    def layouts(self, spec: ModelSpec, line: Line) -> tuple[tuple[int, int], ...]:
        """(tp, pp) pairs that the model and the line admit."""
        fit = tuple((tp, line.groups_fit(tp)) for tp in spec.valid_tp if tp <= line.max_node)
        return _layouts(spec.num_layers, fit, self.paper)

    def replicas(self, totals: Iterable[int], limit: int) -> list[int]:
        """Data-parallel counts up to `limit` for a model-stage whose tasks share out so many samples."""
        found: set[int] = set()
        for total in totals:
            if self.paper:
                found.update(dp for dp in range(1, min(limit, total) + 1) if total % dp == 0)
            else:
                found.update(_useful_counts(total, limit))
        return sorted(found)

    def micro_batches(self, stage: Stage, samples: int) -> list[int]:
        """Micro-batch sizes (for generation, sequences at once) of a unit with so many samples."""
        pinned = self.max_num_seqs if stage is Stage.GENERATION else self.micro_batch
        if pinned is not None:
            return [pinned]
        powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
        if self.paper:
            powers = [size for size in powers if samples % size == 0]
        return [*powers, samples]


@functools.lru_cache(maxsize=64)
def _layouts(num_layers: int, fit: tuple[tuple[int, int], ...], paper: bool) -> tuple[tuple[int, int], ...]:
    """fit: (tp, groups of so many devices that there are)."""
    return tuple(
        (tp, pp)
        for tp, groups in fit
        if not paper or _is_power_of_two(tp)
        for pp in range(1, min(num_layers, groups) + 1)
        if not paper or _is_power_of_two(pp)
    )


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


@functools.lru_cache(maxsize=64)
def _useful_counts(total: int, limit: int) -> tuple[int, ...]:
    """The counts up to `limit` among which `total` samples divide into smaller largest shares than among any fewer."""
    found, dp = [], 1
    while dp <= limit:
        found.append(dp)
        share = -(-total // dp)
        if share == 1:
            break
        dp = -(-total // (share - 1))
    return tuple(found)
