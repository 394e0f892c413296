"""The (dp, micro-batch) pairs of a model-stage, and what each makes of the step's samples.

Everything here depends on the workload and on numbers of samples, not on models, layouts or devices: model-stages that
share out the same samples share it, and whatever the workload does not change stays between decisions.
"""

import dataclasses
import functools

import numpy as np

from nereus.engine_facts import causal_pairs
from nereus.plan import Stage
from nereus.planner.space.arrays import Floats, Ints
from nereus.planner.space.layouts import Space
from nereus.planner.workload import Workload, segments, slowest_mean


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """[settings] each: data-parallel count and micro-batch."""

    dp: Ints
    micro_batch: Ints

    def __len__(self) -> int:
        return len(self.dp)


@functools.lru_cache(maxsize=32)
def pairs_of(space: Space, stage: Stage, totals: tuple[int, ...], unit_total: int, limit: int) -> Pairs:
    """The pairs of a model-stage of `stage` whose tasks share out `totals` samples, at most `limit` units of them.

    unit_total: samples that the units share out at once and that bound the micro-batch.
    """
    listed = [
        (dp, size)
        for dp in space.replicas(totals, min(unit_total, limit))
        for size in space.micro_batches(stage, -(-unit_total // dp))
    ]
    columns = np.array(listed, dtype=np.int64).reshape(-1, 2)
    return Pairs(np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1]))


@functools.lru_cache(maxsize=16)
def amounts_of(work: Workload, pairs: Pairs, window: int | None) -> "Amounts":
    """The amounts of some pairs, shared by the model-stages of a decision."""
    return Amounts(work, pairs, window)


class Amounts:
    """What a unit works on under each pair; window: tokens a query sees at most, None for all."""

    def __init__(self, work: Workload, pairs: Pairs, window: int | None) -> None:
        self.work, self.pairs, self.window = work, pairs, window
        self._passes: dict[int, tuple[Floats, Ints]] = {}
        self._generation: dict[float, Floats] = {}

    def passes(self, samples: int) -> tuple[Floats, Ints]:
        """([4, settings]: 1, tokens, pairs and loss tokens of a micro-batch; [settings]: micro-batches of a unit)."""
        if samples not in self._passes:
            self._passes[samples] = self._contents(samples)
        return self._passes[samples]

    def _contents(self, samples: int) -> tuple[Floats, Ints]:
        work, dp = self.work, self.pairs.dp
        unit = np.maximum(1, -(-samples // dp))
        count = -(-unit // self.pairs.micro_batch)
        each = unit / count
        spread = 0.0 if self.window else (work.response.mean_square - work.response.mean**2) / 2
        counts, first, number = np.unique(dp, return_index=True, return_inverse=True)
        shares = zip(counts.tolist(), unit[first].tolist(), strict=True)
        means = [slowest_mean(work, share, at) for at, share in shares]
        response = np.array(means)[number]
        seen = np.array([causal_pairs(work.prompt_tokens + mean, self.window) for mean in means])[number]
        content = np.stack(
            [np.ones(len(each)), each * (work.prompt_tokens + response), each * (seen + spread), each * response]
        )
        return content, count

    def generation(self, bound_at: float) -> Floats:
        """[8, settings]: prefill passes and prompts, then decode steps, tokens and tokens x context, memory-bound and
        compute-bound; a step is bound by computing from `bound_at` sequences on."""
        if bound_at not in self._generation:
            work, dp = self.work, self.pairs.dp
            samples = np.maximum(1, -(-work.num_samples // dp))
            slots = np.minimum(self.pairs.micro_batch, samples)
            amounts = [samples / slots, samples.astype(np.float64)]
            *phases, batch = self._phases(samples, slots)
            for compute_bound in (False, True):
                amounts += [np.where((batch >= bound_at) == compute_bound, part, 0.0).sum(axis=0) for part in phases]
            self._generation[bound_at] = np.stack(amounts)
        return self._generation[bound_at]

    def _phases(self, samples: Ints, slots: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Decode phases of each setting, [phases, settings]: steps, tokens, tokens x context, sequences at once."""
        work, window = self.work, self.window
        mean, dp = work.response.mean, self.pairs.dp
        pieces = np.array(segments(work.response.values)).reshape(-1, 3)
        start, end, alive = (pieces[:, i : i + 1] for i in range(3))
        steps = np.concatenate([[(samples - slots) * mean / slots], (end - start) * (1 - (1 - alive) ** (slots * dp))])
        batch = np.concatenate([[slots.astype(np.float64)], np.maximum(1.0, slots * alive)])
        context = work.prompt_tokens + np.concatenate([[[mean / 2]], (start + end) / 2])
        seen = np.minimum(context, window) if window else context
        tokens = steps * batch
        return steps, tokens, tokens * seen, batch
