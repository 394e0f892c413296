"""Operations and seconds of a task for every (layout, setting) at once.

    operations of one pass, token, pair, ... of a layout  x  how many of each a setting has  x  how many passes

The counts of a task are linear in what a unit works on: each task is a few `Term`s, products of counts that depend on
the layout and of amounts that depend on the setting. Seconds of all cells are products of small matrices; the bill of
one cell is one of their entries, so what is predicted and what is learned from come from the same formula.
The slowest unit is priced: it has the largest share of the samples and, of random lengths, the expected largest sum.
"""

import dataclasses
import functools

import numpy as np

from nereus.cluster import Accelerator, Link
from nereus.engine_facts import Op, Precision
from nereus.plan import Layout, Recompute
from nereus.planner.prices.calibration import PRIORS
from nereus.planner.prices.footprints import LayoutTable
from nereus.planner.prices.operations import (
    COLUMN,
    KEYS,
    Bill,
    Counts,
    Shape,
    Tokens,
    decode_step,
    head_forward,
    hops,
    layer_forward,
)
from nereus.planner.prices.passes import Span, pipeline_basis
from nereus.planner.space.arrays import Floats
from nereus.planner.space.settings import Amounts
from nereus.workflow import Kind

LAUNCH = COLUMN[(Op.LAUNCH, None)]
ELEMENTWISE = COLUMN[(Op.ELEMENTWISE, None)]
WORK, CALLS = 0, 1
"""The rows of a bill's counts."""

OPTIMIZER_PASSES = 7
"""Wide tensors that one Adam update reads or writes per parameter: gradient, both moments twice, master twice."""

Layouts = tuple[tuple[int, int], ...]
ONCE = np.ones((1, 1))
"""One pass, whatever the layout and the setting."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A part of a task. Axes of length one stand for all layouts, or for all settings.

    counts: [layouts, amounts, 2, classes] operations of one of each amount. amounts: [amounts, settings] in one pass.
    passes: [layouts, settings] passes of the slowest rank. waits: [layouts, settings] passes of others that it waits
    for while its pipeline fills and drains.
    """

    counts: Counts
    amounts: Floats
    passes: Floats
    waits: Floats | None = None

    def seconds(self, lines: Counts) -> Floats:
        """[layouts, settings]; lines: [2, classes] seconds per work and per call."""
        seconds: Floats = np.tensordot(self.counts, lines, axes=2) @ self.amounts
        if self.passes is ONCE:
            return seconds
        return np.multiply(seconds, self.passes if self.waits is None else self.passes + self.waits)

    def bills(self, layout: int, setting: int) -> tuple[Counts, Counts]:
        """([2, classes] work of the slowest rank, [2, classes] what it waits for) of one cell."""
        counts = self.counts[layout % len(self.counts)]
        one = np.tensordot(self.amounts[:, setting % self.amounts.shape[1]], counts, axes=1)
        passes, waits = (
            0.0 if times is None else times[layout % times.shape[0], setting % times.shape[1]]
            for times in (self.passes, self.waits)
        )
        return one * passes, one * waits


class TaskPrices:
    """Prices of tasks of one model under `layouts` (`table` has their numbers) whose axes cross the links of `span`.

    accelerator: says up to which batch decoding is bound by memory. devices_per_node: of the cluster's largest node.
    """

    def __init__(
        self,
        shape: Shape,
        layouts: Layouts,
        table: LayoutTable,
        span: Span,
        amounts: Amounts,
        precision: Precision,
        accelerator: Accelerator,
        devices_per_node: int,
    ) -> None:
        self.shape, self.layouts, self.table, self.span = shape, layouts, table, span
        self.amounts, self.work, self.precision = amounts, amounts.work, precision
        self.balance, self.devices_per_node = machine_balance(accelerator), devices_per_node
        self.value_bytes = precision.param_bytes

    def seconds(self, kind: Kind, lines: Counts, recompute: Recompute) -> Floats:
        """[layouts, settings]: `lines` are the seconds per work and per call of each class."""
        first, *others = self.terms(kind, recompute)
        seconds = first.seconds(lines)  # of all layouts and settings
        for term in others:
            seconds += term.seconds(lines)
        return seconds

    def bills(self, kind: Kind, recompute: Recompute, *, layout: int = 0, setting: int = 0) -> tuple[Bill, Bill]:
        """(operations of the slowest rank, operations it waits for while its pipeline fills and drains) of a cell."""
        work, waited = Bill(), Bill()
        for term in self.terms(kind, recompute):
            own, others = term.bills(layout, setting)
            work.counts += own
            waited.counts += others
        return work, waited

    def terms(self, kind: Kind, recompute: Recompute) -> list[Term]:
        """The parts of a task of a kind."""
        if kind is Kind.GENERATE:
            return [self._generation(), _launched()]
        if kind is Kind.UPDATE:
            return self._update(recompute)
        return [self._forward_and_backward(self.work.num_samples, 1, None), _launched()]

    def _forward_and_backward(self, samples: int, times: int, backward: Recompute | None) -> Term:
        """All micro-batches of a unit through its slowest pipeline stage, `times` times: 1F1B, whose bubble is one
        pass for each stage but the last. backward: None for a forward pass alone."""
        counts = _pass_counts(self.shape, self.layouts, self.value_bytes, self.span, backward)
        content, micro_batches = self.amounts.passes(samples)
        passes = (times * micro_batches).astype(np.float64)[None]
        waits = (times * (self.table.pp - 1)).astype(np.float64)[:, None]
        return Term(counts, content, passes, waits)

    def _update(self, recompute: Recompute) -> list[Term]:
        """All optimizer updates of a step: passes, gradient reduction over the units, and Adam of the flat buffers."""
        updates = self.work.epochs * self.work.mini_batches
        dp, numel = self.amounts.pairs.dp, self.table.ends_numel
        wide, narrow = self.precision.wide_bytes, self.precision.param_bytes
        reduce = COLUMN[(Op.ALL_REDUCE, self.span.dp_link)]
        sent = _zeros(len(numel), 1)
        sent[:, 0, WORK, reduce] = numel * wide
        shared = ONCE
        if self.span.dp_link is Link.INTER_NODE:
            # the units of one node share the traffic over their network cards
            beside = np.maximum(1, self.devices_per_node // (self.table.tp * self.table.pp))
            shared = 1 / np.minimum(dp, beside[:, None])
        fixed = _zeros(len(numel), 2)
        fixed[:, 0, CALLS, reduce] = 1
        fixed[:, 1, WORK, ELEMENTWISE] = numel * (OPTIMIZER_PASSES * wide + 2 * narrow)
        fixed[:, 1, CALLS, ELEMENTWISE] = OPTIMIZER_PASSES
        fixed[:, 1, CALLS, LAUNCH] = 1
        return [
            self._forward_and_backward(self.work.mini_batch_samples, updates, recompute),
            Term(sent, (updates * 2 * (dp - 1) / dp)[None], shared),
            Term(fixed, updates * np.stack([_hops(dp.tobytes()), np.ones(len(dp))]), ONCE),
        ]

    def _generation(self) -> Term:
        """Prefill of all prompts, and decoding with a batch that shrinks, on the unit whose sequences last longest.

        Amounts: prefill passes and prompts, then decode steps, tokens and tokens x context, first of the steps that are
        bound by memory and then of those bound by computing. The slots of a pipeline's stages take turns (a lane a
        stage): a stage is busy all the time with its share of the layers and each lane's share of the batch.
        """
        parts = [self._prefill(), *(self._decoding(bound) for bound in (False, True))]
        return Term(np.concatenate(parts, axis=1), self.amounts.generation(self.balance * self.value_bytes / 2), ONCE)

    def _prefill(self) -> Counts:
        """[layouts, 2, 2, classes]: counts of a prefill pass, and of each prompt in it."""
        prompt = self.work.prompt_tokens
        per = _prefill_counts(self.shape, self.table.sizes, self.value_bytes, self.span.tp_link, prompt)[
            self.table.size
        ]
        per[:, 1] /= self.table.pp[:, None, None]
        self._add_hops(per, tokens=prompt)
        return per

    def _decoding(self, compute_bound: bool) -> Counts:
        """[layouts, 3, 2, classes]: counts of a decode step, of each token in it, and of each token of context one
        attends to."""
        per = _decode_counts(self.shape, self.table.sizes, self.value_bytes, self.span.tp_link, compute_bound)[
            self.table.size
        ]
        per[:, 1:] /= self.table.pp[:, None, None, None]
        per[:, 0, CALLS, LAUNCH] += self.table.pp
        self._add_hops(per, tokens=1)
        return per

    def _add_hops(self, per: Counts, *, tokens: float) -> None:
        """Add to [layouts, (pass, item, ...), 2, classes] the activations handed along the pipeline, and the sampled
        tokens back to its start. tokens: of an item."""
        hop, pp = COLUMN[(Op.POINT_TO_POINT, self.span.pp_link)], self.table.pp
        per[:, 0, CALLS, hop] += np.where(pp > 1, pp, 0)
        per[:, 1, WORK, hop] += (pp - 1) * (tokens * self.shape.hidden * self.value_bytes)


def machine_balance(accelerator: Accelerator) -> float:
    """Operations per byte of memory from which on products are bound by computing, at the priors' efficiencies."""
    return (accelerator.flops_per_s * PRIORS[Op.GEMM].efficiency) / (
        accelerator.memory_bytes_per_s * PRIORS[Op.DECODE_GEMM].efficiency
    )


def _zeros(layouts: int, amounts: int) -> Counts:
    return np.zeros((layouts, amounts, 2, len(KEYS)))


def _launched() -> Term:
    """The call of a task itself."""
    counts = _zeros(1, 1)
    counts[0, 0, CALLS, LAUNCH] = 1
    return Term(counts, ONCE, ONCE)


@functools.lru_cache(maxsize=128)
def _pass_counts(shape: Shape, layouts: Layouts, value_bytes: int, span: Span, backward: Recompute | None) -> Counts:
    """[layouts, 4, 2, classes]: counts of a pipeline pass without tokens, per token, per pair and per loss token."""
    return np.stack(
        [np.stack(pipeline_basis(shape, Layout(tp=tp, pp=pp), value_bytes, span, backward)) for tp, pp in layouts]
    )


@functools.lru_cache(maxsize=64)
def _decode_counts(shape: Shape, sizes: tuple[int, ...], value_bytes: int, link: Link, compute_bound: bool) -> Counts:
    """[tp sizes, 3, 2, classes]: counts of a decode step without tokens, per token, and per token of its context."""

    def counts(tp: int, batch: int, context: int) -> Counts:
        return decode_step(
            shape, batch=batch, context=context, tp=tp, value_bytes=value_bytes, tp_link=link,
            compute_bound=compute_bound,
        ).counts  # fmt: skip

    def basis(tp: int) -> Counts:
        empty, token, seen = counts(tp, 0, 0), counts(tp, 1, 0), counts(tp, 1, 1)
        return np.stack([empty, token - empty, seen - token])

    return np.stack([basis(tp) for tp in sizes])


@functools.lru_cache(maxsize=64)
def _prefill_counts(shape: Shape, sizes: tuple[int, ...], value_bytes: int, link: Link, prompt: float) -> Counts:
    """[tp sizes, 2, 2, classes]: counts of prefilling nothing, and of each prompt more."""

    def counts(tp: int, samples: int) -> Counts:
        tokens = Tokens.of(samples, prompt, loss_length=1, window=shape.window)
        bill = layer_forward(shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link).scaled(shape.layers)
        bill.add_bill(head_forward(shape, tokens, tp=tp, tp_link=link))
        return bill.counts

    return np.stack([np.stack([counts(tp, 0), counts(tp, 1) - counts(tp, 0)]) for tp in sizes])


@functools.lru_cache(maxsize=32)
def _hops(dps: bytes) -> Floats:
    """[settings]: latency steps of a reduction over each data-parallel count; dps: an int64 array's bytes."""
    return np.array([hops(dp) for dp in np.frombuffer(dps, dtype=np.int64).tolist()])
