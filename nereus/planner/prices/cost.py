"""Seconds of a model-stage under a layout, and of a weight synchronization between two layouts.

    workload, spec, layout -> operations counted per task (`operations`) -> seconds (`calibration`)

The slowest unit is priced: it has the largest share of the samples and, of random lengths, the expected largest sum.
Generation follows the length distribution: the batch of a unit shrinks as its sequences end. Training is 1F1B: the
slowest pipeline stage runs all micro-batches, and the others' depth adds a bubble.

It knows neither devices nor placement: a `Span` says which links the axes cross. What overlaps with what is the
search's business.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from nereus.cluster import Accelerator, Cluster, Link
from nereus.engine_facts import Op, causal_pairs
from nereus.model import ModelSpec
from nereus.plan import Layout, ModelStage, Recompute
from nereus.planner.prices.calibration import PRIORS, Calibration
from nereus.planner.prices.memory import Precision, state_numel
from nereus.planner.prices.operations import (
    COLUMN,
    COMPUTE,
    KEYS,
    MEMORY,
    Bill,
    Counts,
    Shape,
    Tokens,
    add_collective,
    decode_step,
    embedding_forward,
    head_forward,
    key_name,
    layer_backward,
    layer_forward,
)
from nereus.planner.space.candidates import Floats, Ints
from nereus.planner.workload import Workload, segments, slowest_mean
from nereus.shards.boxes import layer_range
from nereus.workflow import Kind, Task

BUBBLE = "bubble"
"""Name under which `StageCost.operations` lists the time a rank waits for its pipeline to fill and drain."""

ON_DEVICE = np.array([op in COMPUTE or op in MEMORY or op is Op.LAUNCH for op, _ in KEYS])
"""Classes that slow down where workers share processor cores."""


CONTENTION = 0.1
"""Share by which processor workers on all cores of a node slow each other down: they have cores of their own, but one
memory, one last cache and one budget of power. Between one worker and all it grows with the busy cores. Set on two
cores, where 0.1 predicts both one worker and two (LOG.md, 2026-11-30)."""

OPTIMIZER_PASSES = 7
"""Wide tensors that one Adam update reads or writes per parameter: gradient, both moments twice, master twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Which link class each axis of a model-stage crosses; tensor parallelism stays inside a node."""

    tp_link: Link = Link.INTRA_NODE
    pp_link: Link = Link.INTRA_NODE
    dp_link: Link = Link.INTRA_NODE


@dataclasses.dataclass(frozen=True, slots=True)
class TaskCost:
    """Operations of one task on the slowest rank, those it waits for while the pipeline fills and drains, seconds."""

    work: Bill
    bubble: Bill
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a model-stage in one step: the sum of its tasks. `lines` priced the work (see `Calibration.lines`)."""

    tasks: dict[str, TaskCost]
    lines: Counts

    @property
    def seconds(self) -> float:
        return sum(task.seconds for task in self.tasks.values())

    @property
    def per_task(self) -> dict[str, float]:
        return {name: task.seconds for name, task in self.tasks.items()}

    @property
    def operations(self) -> dict[str, tuple[float, float]]:
        """{class: (work, seconds)} on the slowest rank; `bubble` has no work."""
        total, bubble = Bill(), 0.0
        for task in self.tasks.values():
            total.add_bill(task.work)
            bubble += float((task.bubble.counts * self.lines).sum())
        result = {}
        for key, work, calls in total:
            per_work, fixed = self.lines[:, COLUMN[key]]
            result[key_name(key)] = (work, float(work * per_work + calls * fixed))
        return result | ({BUBBLE: (0.0, bubble)} if bubble else {})


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """Everything a task's price depends on, gathered once per model-stage."""

    shape: Shape
    spec: ModelSpec
    layout: Layout
    dp: int
    workload: Workload
    micro_batch: int
    recompute: Recompute
    precision: Precision
    span: Span
    machine_balance: float
    units_per_node: int


class CostModel:
    """Prices model-stages on a cluster with what the calibration knows."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self.cluster = cluster
        self.calibration = calibration
        self.devices_per_node = max(map(len, cluster.nodes.values()))

    def stage_seconds(
        self,
        model_stage: ModelStage,
        spec: ModelSpec,
        layout: Layout,
        *,
        dp: int,
        workload: Workload,
        micro_batch: int,
        recompute: Recompute,
        precision: Precision,
        tasks: tuple[Task, ...],
        accelerator: str,
        span: Span,
        active_workers_on_node: int | None = None,
    ) -> StageCost:
        """Cost of those of `tasks` that run on `model_stage`, on its slowest unit.

        micro_batch: samples of a micro-batch; for generation, sequences decoded at once by a unit (slots).
        active_workers_on_node: CPU workers that compute at the same time on one node; they share its cores.
        """
        device = self.cluster.accelerator(accelerator)
        setting = _Setting(
            Shape.of(spec), spec, layout, dp, workload, micro_batch, recompute, precision, span,
            machine_balance(device),
            max(1, self.devices_per_node // layout.num_ranks),
        )  # fmt: skip
        lines = self.lines(accelerator, active_workers_on_node)
        costs: dict[str, TaskCost] = {}
        for task in tasks:
            if task.model_stage == model_stage:
                work, bubble = TASK_BILLS[task.kind](setting)
                costs[task.name] = TaskCost(work, bubble, float(((work.counts + bubble.counts) * lines).sum()))
        return StageCost(costs, lines)

    def sync_seconds(
        self,
        spec: ModelSpec,
        source: tuple[Layout, int],
        target: tuple[Layout, int],
        *,
        same_node: bool,
        precision: Precision,
        accelerator: str | None = None,
    ) -> float:
        """Seconds to bring the parameters of (layout, dp) `source` to every unit of `target`.

        Each target rank receives its boxes once; the copies are spread over the source ranks, so the busier side of
        the two bounds the time. accelerator: the slower type of the two sides (default: the cluster's first).
        """
        (source_layout, source_dp), (target_layout, target_dp) = source, target
        whole = spec.num_params * precision.param_bytes
        received = max(state_numel(spec, target_layout, p) for p in range(target_layout.pp)) * precision.param_bytes
        sent = target_dp * whole / (source_dp * source_layout.num_ranks)
        bill = Bill()
        pieces = spec.num_layers * max(1, source_layout.tp // target_layout.tp) / target_layout.pp
        link = Link.INTRA_NODE if same_node else Link.INTER_NODE
        bill.add(Op.POINT_TO_POINT, max(received, sent), pieces, link)
        bill.add(Op.LAUNCH, 0, 1)
        lines = self.lines(accelerator or self.cluster.accelerators[0].name, None)
        return float((bill.counts * lines).sum())

    def lines(self, accelerator: str, active_workers: int | None) -> Counts:
        """Seconds per work and per call; computing takes longer where processor workers share a node (`crowding`)."""
        lines, cores = self.calibration.lines(accelerator), self.cluster.cores_per_node
        if not cores or not active_workers:
            return lines
        return np.where(ON_DEVICE, lines * crowding(np.array(active_workers), cores), lines)


def crowding(workers: Ints, cores: int) -> Floats:
    """[...]: how many times longer processor workers compute where so many share a node of so many cores."""
    busy = (np.minimum(workers, cores) - 1) / max(1, cores - 1)
    times: Floats = np.maximum(1.0, workers / cores) * (1 + CONTENTION * busy)
    return times


def machine_balance(accelerator: Accelerator) -> float:
    """Operations per byte of memory from which on products are bound by computing, at the priors' efficiencies."""
    return (accelerator.flops_per_s * PRIORS[Op.GEMM].efficiency) / (
        accelerator.memory_bytes_per_s * PRIORS[Op.DECODE_GEMM].efficiency
    )


def _update_bill(at: _Setting) -> tuple[Bill, Bill]:
    """All optimizer updates of a step: `epochs` x `mini_batches`, each over its share of the samples."""
    work = at.workload
    micro_batches, tokens = _micro_batches(at, work.num_samples / work.mini_batches)
    updates = work.epochs * work.mini_batches
    one = _pipeline_stage(at, tokens, backward=True)
    total = one.scaled(micro_batches * updates)
    total.add_bill(_update_once(at), updates)
    return total, one.scaled((at.layout.pp - 1) * updates)


def _update_once(at: _Setting) -> Bill:
    """Gradient reduction over the units and one Adam update of the rank's flat buffers."""
    bill, pp, wide = Bill(), at.layout.pp, at.precision.wide_bytes
    numel = max(state_numel(at.spec, at.layout, pp_rank) for pp_rank in (0, pp - 1))
    add_collective(bill, Op.ALL_REDUCE, numel * wide, 1, at.dp, at.span.dp_link, ranks_per_node=at.units_per_node)
    bill.add(Op.ELEMENTWISE, numel * (OPTIMIZER_PASSES * wide + 2 * at.precision.param_bytes), OPTIMIZER_PASSES)
    bill.add(Op.LAUNCH, 0, 1)
    return bill


def _forward_bill(at: _Setting) -> tuple[Bill, Bill]:
    """A forward pass over all samples of a step: log-probabilities, values or scores."""
    micro_batches, tokens = _micro_batches(at, at.workload.num_samples)
    one = _pipeline_stage(at, tokens, backward=False)
    total = one.scaled(micro_batches)
    total.add(Op.LAUNCH, 0, 1)
    return total, one.scaled(at.layout.pp - 1)


def _micro_batches(at: _Setting, samples: float) -> tuple[int, Tokens]:
    """(number of micro-batches, mean content of one) of the slowest unit, given the samples all units share."""
    work, unit_samples = at.workload, max(1, -(-int(samples) // at.dp))
    count = -(-unit_samples // at.micro_batch)
    each = unit_samples / count
    response = slowest_mean(work, unit_samples, at.dp)
    length = work.prompt_tokens + response
    spread = work.response.mean_square - work.response.mean**2
    pairs = causal_pairs(length, at.shape.window) + (0.0 if at.shape.window else spread / 2)
    return count, Tokens(each * length, each * pairs, each * response)


def _pipeline_stage(at: _Setting, tokens: Tokens, *, backward: bool) -> Bill:
    """One micro-batch through the slowest pipeline stage: the last, which has most layers and the head."""
    basis = pipeline_basis(
        at.shape, at.layout, at.precision.param_bytes, at.span, at.recompute if backward else None
    )  # fmt: skip
    return Bill(basis[0] + tokens.count * basis[1] + tokens.pairs * basis[2] + tokens.loss * basis[3])


@functools.lru_cache(maxsize=4096)
def pipeline_basis(
    shape: Shape, layout: Layout, value_bytes: int, span: Span, backward: Recompute | None
) -> tuple[Counts, Counts, Counts, Counts]:
    """Counts of a pass without tokens, and per token, per pair and per loss token: all counts are linear in these."""
    units = (Tokens(0, 0, 0), Tokens(1, 0, 0), Tokens(0, 1, 0), Tokens(0, 0, 1))
    empty, *others = (_pipeline_pass(shape, layout, value_bytes, span, backward, unit).counts for unit in units)
    count, pairs, loss = (other - empty for other in others)
    return empty, count, pairs, loss


def _pipeline_pass(
    shape: Shape, layout: Layout, value_bytes: int, span: Span, backward: Recompute | None, tokens: Tokens
) -> Bill:
    """Forward, and with `backward` also the backward pass and what it recomputes."""
    tp, pp, link = layout.tp, layout.pp, span.tp_link
    layers = len(layer_range(shape.layers, pp, pp - 1))
    forward = layer_forward(shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    ends = head_forward(shape, tokens, tp=tp, tp_link=link)
    if pp == 1:
        ends.add_bill(embedding_forward(shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link))
    bill = forward.scaled(layers)
    bill.add_bill(ends)
    if backward is not None:
        bill.add_bill(layer_backward(forward), layers)
        bill.add_bill(layer_backward(ends))
        bill.add_bill(recomputed(forward, backward), layers)
    passes = 1 if backward is None else 2
    if pp > 1:
        bill.add(Op.POINT_TO_POINT, passes * tokens.count * shape.hidden * value_bytes, passes, span.pp_link)
    bill.add(Op.LAUNCH, 0, passes)
    return bill


def recomputed(forward: Bill, recompute: Recompute) -> Bill:
    """What the backward pass of a layer computes again."""
    if recompute is Recompute.FULL:
        return forward
    bill = Bill()
    if recompute is Recompute.SELECTIVE:
        column = COLUMN[(Op.ELEMENTWISE, None)]
        bill.counts[:, column] = forward.counts[:, column] / 2
    return bill


def _generate_bill(at: _Setting) -> tuple[Bill, Bill]:
    """Prefill of all prompts and decoding with a batch that shrinks, on the unit whose sequences last longest.

    The slots of a pipeline's stages take turns (a lane a stage), so a stage is busy all the time with its share of the
    layers and each lane's share of the batch. With fewer slots than samples a finished sequence's slot is refilled: the
    batch stays full for (samples - slots) * mean length / slots steps, then shrinks like a fresh batch of `slots`
    samples.
    """
    work, samples = at.workload, max(1, -(-at.workload.num_samples // at.dp))
    slots = min(max(1, at.micro_batch), samples)
    bill, mean = Bill(), at.workload.response.mean
    _add_prefill(bill, at, samples, slots)
    full_steps = (samples - slots) * mean / slots
    phases = [(full_steps, float(slots), work.prompt_tokens + mean / 2)]
    for start, end, alive in segments(work.response.values):
        some_alive = 1 - (1 - alive) ** (slots * at.dp)
        phases.append(((end - start) * some_alive, max(1.0, slots * alive), work.prompt_tokens + (start + end) / 2))
    bound_by_memory = [phase for phase in phases if not _compute_bound(phase[1], at)]
    bound_by_compute = [phase for phase in phases if _compute_bound(phase[1], at)]
    for part in (bound_by_memory, bound_by_compute):
        _add_decode(bill, at, part)
    bill.add(Op.LAUNCH, 0, 1)
    return bill, Bill()


def _add_prefill(bill: Bill, at: _Setting, samples: int, slots: int) -> None:
    prompt = at.workload.prompt_tokens
    tp, value_bytes, link = at.layout.tp, at.precision.param_bytes, at.span.tp_link
    tokens = Tokens.of(slots / at.layout.pp, prompt, loss_length=1, window=at.shape.window)
    passes = samples / slots
    layer = layer_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    bill.add_bill(layer, at.shape.layers * passes)
    bill.add_bill(head_forward(at.shape, tokens, tp=tp, tp_link=link), passes)
    _add_hops(bill, at, slots * prompt, passes)


def _add_decode(bill: Bill, at: _Setting, phases: list[tuple[float, float, float]]) -> None:
    """Decode steps of (steps, batch, context) phases on one side of the roofline; counts are linear in all three."""
    steps = sum(phase[0] for phase in phases)
    if not steps:
        return
    window = at.shape.window
    tokens = sum(count * batch for count, batch, _ in phases)
    seen = sum(count * batch * (min(context, window) if window else context) for count, batch, context in phases)
    one = decode_step(
        at.shape,
        batch=tokens / steps / at.layout.pp,
        context=seen / tokens,
        tp=at.layout.tp,
        value_bytes=at.precision.param_bytes,
        tp_link=at.span.tp_link,
        compute_bound=_compute_bound(phases[0][1], at),
    )
    bill.add_bill(one, steps)
    bill.add(Op.LAUNCH, 0, steps * at.layout.pp)
    _add_hops(bill, at, tokens / steps, steps)


def _compute_bound(batch: float, at: _Setting) -> bool:
    """Whether multiplying `batch` tokens takes longer than reading the weights once."""
    return 2 * batch >= at.machine_balance * at.precision.param_bytes


def _add_hops(bill: Bill, at: _Setting, tokens: float, passes: float) -> None:
    """Activations handed along the pipeline, and the sampled tokens back to its start."""
    pp = at.layout.pp
    if pp > 1:
        payload = tokens * at.shape.hidden * at.precision.param_bytes * (pp - 1)
        bill.add(Op.POINT_TO_POINT, payload * passes, pp * passes, at.span.pp_link)


TASK_BILLS: dict[Kind, Callable[[_Setting], tuple[Bill, Bill]]] = {
    Kind.GENERATE: _generate_bill,
    Kind.LOGPROBS: _forward_bill,
    Kind.VALUES: _forward_bill,
    Kind.SCORES: _forward_bill,
    Kind.UPDATE: _update_bill,
}
"""Who counts the operations, and the bubble, of which kind of task."""
