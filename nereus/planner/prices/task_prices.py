"""Seconds of a task for every (layout, setting) at once: the counts of `operations` as matrices.

`cost` prices one layout and setting and is the definition. Its counts are linear in passes, tokens, pairs and calls:
here they are taken once per layout (and kept, for they depend on the model's shape alone), turned into seconds, and
spread over all settings by products of small matrices. A test holds the two together.
"""

import functools

import numpy as np

from nereus.cluster import Accelerator, Link
from nereus.engine_facts import Op
from nereus.plan import Layout, Recompute
from nereus.planner.prices.cost import OPTIMIZER_PASSES, Span, machine_balance, pipeline_basis
from nereus.planner.prices.footprints import LayoutTable
from nereus.planner.prices.memory import Precision
from nereus.planner.prices.operations import (
    COLUMN,
    Counts,
    Shape,
    Tokens,
    decode_step,
    head_forward,
    hops,
    layer_forward,
)
from nereus.planner.space.candidates import Floats
from nereus.planner.space.settings import Amounts
from nereus.workflow import Kind

LAUNCH = COLUMN[(Op.LAUNCH, None)]
ELEMENTWISE = COLUMN[(Op.ELEMENTWISE, None)]

Layouts = tuple[tuple[int, int], ...]


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
        if kind is Kind.GENERATE:
            return self._generate(lines)
        if kind is Kind.UPDATE:
            return self._update(lines, recompute)
        seconds: Floats = self._passes(lines, self.work.num_samples, None) + lines[1, LAUNCH]
        return seconds

    def _passes(self, lines: Counts, samples: int, backward: Recompute | None) -> Floats:
        """All micro-batches of a unit through its slowest pipeline stage, and the bubble."""
        counts = _pass_counts(self.shape, self.layouts, self.value_bytes, self.span, backward)
        content, micro_batches = self.amounts.passes(samples)
        seconds: Floats = np.tensordot(counts, lines, axes=2) @ content
        seconds *= micro_batches + (self.table.pp[:, None] - 1)
        return seconds

    def _update(self, lines: Counts, recompute: Recompute) -> Floats:
        """All optimizer updates of a step: passes, gradient reduction and Adam."""
        work, table, dp, wide = self.work, self.table, self.amounts.pairs.dp, self.precision.wide_bytes
        reduce = COLUMN[(Op.ALL_REDUCE, self.span.dp_link)]
        sent = np.multiply.outer(table.ends_numel * wide, 2 * (dp - 1) / dp)
        if self.span.dp_link is Link.INTER_NODE:
            beside = np.maximum(1, self.devices_per_node // (table.tp * table.pp))
            sent /= np.minimum(dp, beside[:, None])
        per_element = OPTIMIZER_PASSES * wide + 2 * self.precision.param_bytes
        fixed = OPTIMIZER_PASSES * lines[1, ELEMENTWISE] + lines[1, LAUNCH]
        adam = table.ends_numel * per_element * lines[0, ELEMENTWISE] + fixed
        once = sent * lines[0, reduce] + (_hops(dp.tobytes()) * lines[1, reduce] + adam[:, None])
        passes = self._passes(lines, int(work.num_samples / work.mini_batches), recompute)
        seconds: Floats = (work.epochs * work.mini_batches) * (passes + once)
        return seconds

    def _generate(self, lines: Counts) -> Floats:
        """Prefill and decoding: seconds are linear in passes, prompts, and each side's steps, tokens and context."""
        parts = [self._prefill_seconds(lines), *(self._decode_seconds(lines, bound) for bound in (False, True))]
        amounts = self.amounts.generation(self.balance * self.value_bytes / 2)
        seconds: Floats = np.concatenate(parts, axis=1) @ amounts + lines[1, LAUNCH]
        return seconds

    def _prefill_seconds(self, lines: Counts) -> Floats:
        """[layouts, 2]: seconds of a prefill pass, and of each prompt in it."""
        prompt = self.work.prompt_tokens
        counts = _prefill_counts(self.shape, self.table.sizes, self.value_bytes, self.span.tp_link, prompt)
        per: Floats = np.tensordot(counts, lines, axes=2)[self.table.size]
        per[:, 1] /= self.table.pp
        per_pass, per_token = self._hop_seconds(lines)
        per[:, 0] += per_pass
        per[:, 1] += per_token * prompt
        return per

    def _decode_seconds(self, lines: Counts, compute_bound: bool) -> Floats:
        """[layouts, 3]: seconds of a decode step, of each token in it, and of each token of context one attends to."""
        counts = _decode_counts(self.shape, self.table.sizes, self.value_bytes, self.span.tp_link, compute_bound)
        per: Floats = np.tensordot(counts, lines, axes=2)[self.table.size]
        per[:, 1:] /= self.table.pp[:, None]
        per_pass, per_token = self._hop_seconds(lines)
        per[:, 0] += per_pass + self.table.pp * lines[1, LAUNCH]
        per[:, 1] += per_token
        return per

    def _hop_seconds(self, lines: Counts) -> tuple[Floats, Floats]:
        """([layouts] each) seconds to hand activations along the pipeline: of a pass, and of each token in it."""
        hop, pp = COLUMN[(Op.POINT_TO_POINT, self.span.pp_link)], self.table.pp
        per_token = (pp - 1) * (self.shape.hidden * self.value_bytes * lines[0, hop])
        return np.where(pp > 1, pp * lines[1, hop], 0.0), per_token


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
