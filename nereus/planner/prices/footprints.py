"""Bytes of many candidates at once, on the fullest rank of a unit, part by part.

State follows the flat buffers of the engine exactly (alignment included). A rank's peak is the largest of the moments
that can be it (the logits, a layer's backward, the embedding's gradient), at the pipeline stage where it is highest.
Lengths enter by their longest samples: a micro-batch is assumed to hold the longest ones of the unit.

Of a pipeline's ranks four can be the fullest: the first, the last, and the first in between of each number of layers
(in-flight micro-batches only fall towards the end). It does not know the device's size, the headroom, or what else
lives on the device: the search adds those up.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from nereus.engine_facts import (
    BUCKET_BYTES,
    BUCKETS_STAGED,
    LOGITS_COPIES,
    MAX_PACKED_BYTES,
    MAX_SENDS,
    SAMPLING_COPIES,
    Precision,
)
from nereus.model import Head, ModelSpec
from nereus.plan import Layout, ModelStage, Recompute, Stage
from nereus.planner.prices.memory import (
    backward_bytes_per_token,
    forward_bytes_per_token,
    layer_bytes_per_token,
    logits_bytes,
    mlp_bytes_per_token,
    state_numel,
    vocabulary_matrix_bytes,
)
from nereus.planner.space.arrays import Floats, Ints, Mask
from nereus.planner.space.candidates import RECOMPUTES
from nereus.planner.workload import Lengths, Workload
from nereus.shards.boxes import layer_range
from nereus.shards.kv_blocks import block_numel, blocks_for, cache_heads

NUM_RANKS = 4

Parts = dict[str, Ints]
"""Bytes of each part of a memory, [ranks, rows] each; [1, rows] where ranks do not differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutTable:
    """What memory depends on per layout: [layouts] or [layouts, 4 pipeline ranks], ascending in the rank."""

    tp: Ints
    pp: Ints
    rank: Ints
    layers: Ints
    numel: Ints
    kv_heads: Ints
    largest_numel: Ints
    """Largest flat buffer of any rank (what a rank receives in a weight synchronization)."""
    ends_numel: Ints
    """Largest of the first and the last rank (what an optimizer update is priced on)."""
    sizes: tuple[int, ...]
    """The tensor-parallel sizes, ascending."""
    size: Ints
    """[layouts]: the number of each layout's among `sizes`."""


@functools.lru_cache(maxsize=256)
def layout_table(spec: ModelSpec, layouts: tuple[tuple[int, int], ...], pp_rank: int | None = None) -> LayoutTable:
    """The table of (tp, pp) pairs; depends on the model alone, so it is kept between decisions.

    pp_rank: the only pipeline rank to look at, instead of those that can be the fullest.
    """
    ranks = [_full_ranks(spec.num_layers, pp) if pp_rank is None else [pp_rank] * NUM_RANKS for _, pp in layouts]
    layers = [
        [len(layer_range(spec.num_layers, pp, r)) for r in rank] for (_, pp), rank in zip(layouts, ranks, strict=True)
    ]
    numel = [
        [state_numel(spec, Layout(tp=tp, pp=pp), r) for r in rank]
        for (tp, pp), rank in zip(layouts, ranks, strict=True)
    ]
    heads = {tp: cache_heads(spec, tp) for tp in {t for t, _ in layouts}}
    states = np.array(numel, dtype=np.int64).reshape(-1, NUM_RANKS)
    return LayoutTable(
        tp=np.array([tp for tp, _ in layouts], dtype=np.int64),
        pp=np.array([pp for _, pp in layouts], dtype=np.int64),
        rank=np.array(ranks, dtype=np.int64).reshape(-1, NUM_RANKS),
        layers=np.array(layers, dtype=np.int64).reshape(-1, NUM_RANKS),
        numel=states,
        kv_heads=np.array([heads[tp] for tp, _ in layouts], dtype=np.int64),
        largest_numel=states.max(axis=1),
        ends_numel=np.maximum(states[:, 0], states[:, -1]),
        sizes=tuple(sorted(heads)),
        size=np.searchsorted(sorted(heads), [tp for tp, _ in layouts]).astype(np.int64),
    )


def _full_ranks(num_layers: int, pp: int) -> list[int]:
    """The pipeline ranks that can be the fullest, ascending, four of them (repeated where there are fewer)."""
    found = {0, pp - 1}
    seen: set[int] = set()
    for rank in range(1, pp - 1):
        layers = len(layer_range(num_layers, pp, rank))
        if layers not in seen:
            seen.add(layers)
            found.add(rank)
        if len(seen) == 2:
            break
    ranks = sorted(found)
    return [ranks[0]] * (NUM_RANKS - len(ranks)) + ranks


def smallest_state(trains: bool, table: LayoutTable, precision: Precision) -> Ints:
    """[layouts]: bytes of state that every candidate of a layout holds on its fullest rank (none where shared)."""
    if not trains:
        return np.zeros(len(table.tp), dtype=np.int64)
    smallest: Ints = table.numel.min(axis=1) * trained_bytes(precision)
    return smallest


def trained_bytes(precision: Precision) -> int:
    """Bytes of a trained parameter while it trains: its state and its gradient."""
    return precision.state_bytes(trains=True) + precision.wide_bytes


class Longest:
    """`Lengths.longest_of` over arrays: tokens of the `count` longest of `among` samples."""

    def __init__(self, lengths: Lengths) -> None:
        self.size = len(lengths.values)
        self.sums = np.concatenate([[0.0], np.cumsum(lengths.values[::-1])])
        self.constant = lengths.values[0] if lengths.values[0] == lengths.values[-1] else None

    def __call__(self, count: Floats | Ints, among: Floats | Ints) -> Floats:
        count = np.minimum(count, among)
        if self.constant is not None:
            return np.asarray(count * self.constant, dtype=np.float64)
        share = among / self.size
        taken = count / share
        whole = np.minimum(taken.astype(np.int64), self.size - 1)
        first = self.sums[whole]
        result: Floats = share * (first + (taken - whole) * (self.sums[whole + 1] - first))
        return result


@functools.lru_cache(maxsize=64)
def longest_of(lengths: Lengths) -> Longest:
    """Kept while lengths stay: all model-stages of a step share it."""
    return Longest(lengths)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenBytes:
    """What memory depends on per tensor-parallel size: bytes of a token, and of a vocabulary matrix; [sizes] each.

    kept, backward: [recomputations, sizes], in the order of `RECOMPUTES`. logits: by the copies held at once.
    """

    kept: Floats
    backward: Floats
    forward: Floats
    mlp: Floats
    vocabulary_matrix: Floats
    logits: dict[int, Floats]


@functools.lru_cache(maxsize=256)
def token_bytes(spec: ModelSpec, sizes: tuple[int, ...], value_bytes: int) -> TokenBytes:
    """The bytes of some tensor-parallel sizes; depends on the model alone, so it is kept between decisions."""

    def by_tp(value: Callable[[int], float]) -> Floats:
        return np.array([value(tp) for tp in sizes], dtype=np.float64)

    def by_recompute(value: Callable[[ModelSpec, int, Recompute, int], float]) -> Floats:
        return np.array([[value(spec, tp, recompute, value_bytes) for tp in sizes] for recompute in RECOMPUTES], float)

    def logits(copies: int) -> Floats:
        return by_tp(lambda tp: logits_bytes(spec, tp, value_bytes, 1, copies=copies))

    return TokenBytes(
        kept=by_recompute(layer_bytes_per_token),
        backward=by_recompute(backward_bytes_per_token),
        forward=by_tp(lambda tp: forward_bytes_per_token(spec, tp, value_bytes)),
        mlp=by_tp(lambda tp: mlp_bytes_per_token(spec, tp, value_bytes)),
        vocabulary_matrix=by_tp(lambda tp: vocabulary_matrix_bytes(spec, tp, value_bytes)),
        logits={copies: logits(copies) for copies in (1, LOGITS_COPIES, SAMPLING_COPIES)},
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Footprints:
    """Bytes on the fullest rank, [rows]."""

    active: Ints
    idle: Ints
    shared_active: Ints
    shared_idle: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the fullest rank of one unit of one model-stage.

    active: parts while its tasks run (weights, gradients, masters, moments, activations, logits, kv_cache,
        packed_weights, sync_buffers, workspace); a part that is zero is absent.
    idle: parts that stay while other model-stages run.
    """

    active: dict[str, int]
    idle: dict[str, int]

    @property
    def active_bytes(self) -> int:
        return sum(self.active.values())

    @property
    def idle_bytes(self) -> int:
        return sum(self.idle.values())


def footprints(
    model_stage: ModelStage,
    spec: ModelSpec,
    table: LayoutTable,
    at: Ints,
    *,
    dp: Ints,
    micro_batch: Ints,
    workload: Workload,
    recompute: Recompute,
    precision: Precision,
) -> Footprints:
    """Memory of each row: layout number `at[row]` of the table with its dp and micro-batch."""
    stage = _StageFootprint(
        model_stage, spec, table, at, dp, micro_batch, workload, RECOMPUTES.index(recompute), precision
    )  # fmt: skip
    active, idle = stage.fullest(shared=False)
    if stage.trains:
        return Footprints(active, idle, active, idle)
    return Footprints(active, idle, *stage.fullest(shared=True))


def stage_memory(
    model_stage: ModelStage,
    spec: ModelSpec,
    layout: Layout,
    *,
    dp: int,
    workload: Workload,
    micro_batch: int,
    recompute: Recompute,
    precision: Precision,
    shares_weights: bool = False,
    pp_rank: int | None = None,
) -> StageMemory:
    """One row with its parts: memory of the fullest rank of the fullest unit.

    micro_batch: samples of a micro-batch; for generation, sequences decoded at once by a unit (slots).
    shares_weights: the role's training model-stage holds the parameters and counts them.
    pp_rank: the fullest tensor-parallel rank of this pipeline stage instead.
    """
    (memory,) = setting_memories(
        model_stage, spec, layout, ((micro_batch, recompute),), dp=dp, workload=workload, precision=precision,
        shares_weights=shares_weights, pp_rank=pp_rank,
    )  # fmt: skip
    return memory


@functools.lru_cache(maxsize=1024)
def setting_memories(
    model_stage: ModelStage,
    spec: ModelSpec,
    layout: Layout,
    settings: tuple[tuple[int, Recompute], ...],
    *,
    dp: int,
    workload: Workload,
    precision: Precision,
    shares_weights: bool,
    pp_rank: int | None = None,
) -> tuple[StageMemory, ...]:
    """`stage_memory` of every (micro-batch, recomputation) of one layout and dp, as the rows of one table.

    It is kept: plans that are compared at the same lengths share most of their model-stages.
    """
    table = layout_table(spec, ((layout.tp, layout.pp),), pp_rank)
    at = np.zeros(len(settings), dtype=np.int64)
    micro_batch = np.array([size for size, _ in settings], dtype=np.int64)
    recompute = np.array([RECOMPUTES.index(recompute) for _, recompute in settings], dtype=np.int64)
    stage = _StageFootprint(model_stage, spec, table, at, at + dp, micro_batch, workload, recompute, precision)
    return stage.memories(shared=shares_weights)


class _StageFootprint:
    """The rows of one model-stage and the bytes of its parts on every pipeline rank of the table.

    recompute: number of each row's among `RECOMPUTES`, or of all rows'.
    """

    def __init__(
        self,
        model_stage: ModelStage,
        spec: ModelSpec,
        table: LayoutTable,
        at: Ints,
        dp: Ints,
        micro_batch: Ints,
        workload: Workload,
        recompute: Ints | int,
        precision: Precision,
    ) -> None:
        self.stage, self.spec, self.precision, self.workload = model_stage.stage, spec, precision, workload
        self.trains = self.stage is Stage.TRAINING
        self.pp, self.kv_heads, self.size, self.recompute = table.pp[at], table.kv_heads[at], table.size[at], recompute
        self.rank, self.layers, self.numel = (column.T[:, at] for column in (table.rank, table.layers, table.numel))
        total = workload.mini_batch_samples if self.trains else workload.num_samples
        self.samples = np.maximum(1, -(-total // dp))
        self.micro_batch = np.maximum(1, np.minimum(micro_batch, self.samples))
        self.prompt = workload.max_prompt_tokens or workload.prompt_tokens
        self.longest = longest_of(workload.response)
        self.bytes = token_bytes(spec, table.sizes, precision.param_bytes)
        self.vocabulary_matrix = self.bytes.vocabulary_matrix[self.size]
        self.state_bytes = spec.hidden * precision.param_bytes

    def fullest(self, *, shared: bool) -> tuple[Ints, Ints]:
        """(active, idle) bytes, [rows], of the rank with most active bytes; of equal ranks the first."""
        active, idle = self.held(shared=shared)
        place = active.argmax(axis=0)[None]
        return np.take_along_axis(active, place, axis=0)[0], np.take_along_axis(idle, place, axis=0)[0]

    def memories(self, *, shared: bool) -> tuple[StageMemory, ...]:
        """Every row with its parts, on the rank that `fullest` finds."""
        places = self.held(shared=shared)[0].argmax(axis=0).tolist()
        return tuple(self._memory(place, row, shared=shared) for row, place in enumerate(places))

    def _memory(self, place: int, row: int, *, shared: bool) -> StageMemory:
        idle, working = self.parts(place, row, shared=shared)
        active = {part: size for part, size in (idle | working).items() if size}
        return StageMemory(active, {part: active[part] for part in idle if part in active})

    def held(self, *, shared: bool) -> tuple[Ints, Ints]:
        """(active, idle) bytes of each rank, [ranks, rows]: the sums of its `parts`."""
        idle = self._state(shared=shared)
        active = idle + self._working_bytes
        return active + self._sync_buffers if self.trains or not shared else active, idle

    def parts(self, place: int, row: int, *, shared: bool) -> tuple[dict[str, int], dict[str, int]]:
        """(parts that stay while others run, parts beside them while it runs) of a rank of the table and a row."""
        numel, precision = int(self.numel[place, row]), self.precision
        idle = {"weights": numel * (0 if shared and not self.trains else precision.param_bytes)}
        if self.trains:
            wide = numel * precision.wide_bytes
            idle |= {"gradients": wide, "masters": wide * precision.has_masters, "moments": 2 * wide}
        # a part that is the same on every rank is a single line of its table
        working = {part: int(size[place % len(size), row]) for part, size in self._working.items()}
        if self.trains or not shared:
            working["sync_buffers"] = int(self._sync_buffers[place, row])
        return idle, working

    def _state(self, *, shared: bool) -> Ints:
        """Bytes of all parts that stay: the sum of those of `parts`."""
        if not self.trains:
            return self.numel * (0 if shared else self.precision.param_bytes)
        return self.numel * trained_bytes(self.precision)

    @functools.cached_property
    def _sync_buffers(self) -> Ints:
        # a buffer goes out and another comes in; of both together so many buckets are staged
        buffers: Ints = np.minimum(BUCKETS_STAGED * BUCKET_BYTES, 2 * self.numel * self.precision.param_bytes)
        return buffers

    @functools.cached_property
    def _working_bytes(self) -> Ints:
        return functools.reduce(np.add, self._working.values())

    @functools.cached_property
    def _working(self) -> Parts:
        """What is held beyond the state while the model-stage runs."""
        last = self.rank == self.pp - 1
        if self.stage is Stage.GENERATION:
            return self._generation(last)
        loss_tokens = self.longest(self.micro_batch, self.samples)
        tokens = self.micro_batch * self.prompt + loss_tokens
        if self.trains:
            return self._training(last, tokens, loss_tokens)
        # nothing is kept for a backward pass, but what is on its way to be sent
        forward = self.bytes.forward[self.size]
        transient = (forward + np.where(last, 0, MAX_SENDS * self.state_bytes)) * tokens
        logits = self._logits(loss_tokens, self.state_bytes * tokens)
        return _one_moment(np.where(last, logits, 0), transient)

    def _training(self, last: Mask, tokens: Floats, loss_tokens: Floats) -> Parts:
        """What micro-batches in flight under 1F1B keep, and the largest of the moments beside it.

        A stage keeps of each micro-batch its layers' activations and what it sent on. The first stage's embedding has
        a whole gradient when the layers of a micro-batch have given theirs back.
        """
        micro_batches = -(-self.samples // self.micro_batch)
        in_flight = np.minimum(self.pp - self.rank, micro_batches)
        count = np.minimum(in_flight * self.micro_batch, self.samples)
        kept, state = self.bytes.kept[self.recompute, self.size] * self.layers, self.state_bytes
        backward, mlp = self.bytes.backward[self.recompute, self.size], self.bytes.mlp[self.size]
        transient = backward * tokens + mlp * np.maximum(tokens, self.spec.hidden)
        embedding = self.vocabulary_matrix + (state - kept) * tokens
        sends = np.minimum(MAX_SENDS, micro_batches - 1) * state * tokens
        transient = np.where(self.rank == 0, np.maximum(transient, embedding), transient + sends)
        activations = (kept + np.where(last, 0, state)) * (count * self.prompt + self.longest(count, self.samples))
        parts: Parts = {"activations": activations.astype(np.int64)}
        if self.spec.head is not Head.LM:
            return parts | _one_moment(np.zeros_like(self.rank), transient)
        gradient = self._logits(loss_tokens, copies=1) + self.vocabulary_matrix.astype(np.int64)
        logits = np.maximum(self._logits(loss_tokens, state * tokens), gradient)
        return parts | _one_moment(np.where(last, logits, 0), transient)

    def _generation(self, last: Mask) -> Parts:
        """The cache, whose slots all hold the longest sequence; what decoding copies of the weights (all but an
        embedding that is no head too); and the transients of the prefill or one step's logits.

        The cache has the blocks that the engine would take, counted with the engine's function and on every rank as on
        the fullest: that many bytes a plan gives each. The slots of a pipeline's stages take turns, a lane a stage. A
        sequence that outgrows those counted may have to be prefilled again.
        """
        value_bytes, work = self.precision.param_bytes, self.workload
        most_layers = -(-self.spec.num_layers // self.pp)
        block = block_numel(most_layers, self.kv_heads, self.spec.head_dim) * value_bytes
        cache = blocks_for(self.micro_batch, longest=work.longest_tokens, cap=work.cap_tokens) * block
        size = self.numel * value_bytes
        embeds = (self.rank == 0) & ~(last & self.spec.tied)
        packed = size - np.where(embeds, self.vocabulary_matrix, 0).astype(np.int64)
        packed = np.where(self.precision.has_masters | (size > MAX_PACKED_BYTES), 0, packed)
        lane = -(-self.micro_batch // self.pp)
        logits = np.where(last, self._logits(lane, copies=SAMPLING_COPIES), 0)
        prefill = self.bytes.forward[self.size] * np.maximum(self.prompt * lane, work.again_tokens)
        parts: Parts = {"kv_cache": cache[None], "packed_weights": packed}
        return parts | _one_moment(logits, prefill)

    def _logits(self, tokens: Floats | Ints, output: Floats | int = 0, *, copies: int = LOGITS_COPIES) -> Ints:
        """`memory.logits_bytes` of a number of tokens per row; the stage's output counts where there are logits."""
        per_token = self.bytes.logits[copies][self.size]
        result: Ints = np.where(per_token > 0, tokens * per_token + output, 0).astype(np.int64)
        return result


def _one_moment(logits: Ints, transient: Floats) -> Parts:
    """The logits and a layer's transients are not alive together: the larger counts, as logits and the rest."""
    return {"logits": logits, "workspace": np.maximum(0, transient.astype(np.int64) - logits)}
