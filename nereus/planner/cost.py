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
import math
import statistics
from collections.abc import Callable

from nereus.boxes import layer_range
from nereus.cluster import Cluster, Link
from nereus.model import ModelSpec
from nereus.plan import Layout, ModelStage
from nereus.planner.calibration import PRIORS, Calibration
from nereus.planner.memory import Precision, Recompute, state_numel
from nereus.planner.operations import (
    COMPUTE,
    MEMORY,
    Bill,
    Op,
    Shape,
    Tokens,
    add_collective,
    causal_pairs,
    decode_step,
    embedding_forward,
    head_forward,
    key_name,
    layer_backward,
    layer_forward,
)
from nereus.planner.workload import Workload
from nereus.workflow import Kind, Task

BUBBLE = "bubble"
"""Name under which `StageCost.operations` lists the time a rank waits for its pipeline to fill and drain."""

MAX_SEGMENTS = 24
"""Pieces into which the length distribution of a generation is cut."""

OPTIMIZER_PASSES = 7
"""Wide tensors that one Adam update reads or writes per parameter: gradient, both moments twice, master twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Which link class each axis of a model-stage crosses; tensor parallelism stays inside a node."""

    tp_link: Link = Link.INTRA_NODE
    pp_link: Link = Link.INTRA_NODE
    dp_link: Link = Link.INTRA_NODE


@dataclasses.dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a model-stage in one step.

    seconds: sum of its tasks. per_task: by task name. operations: {class: (work, seconds)} on the slowest rank;
    `bubble` has no work.
    """

    seconds: float
    per_task: dict[str, float]
    operations: dict[str, tuple[float, float]]


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


@dataclasses.dataclass(slots=True)
class TaskBill:
    """Operations of one task on the slowest rank, and those it waits for while the pipeline fills and drains."""

    work: Bill
    bubble: Bill

    @classmethod
    def empty(cls) -> "TaskBill":
        return cls(Bill(), Bill())


class CostModel:
    """Prices model-stages on a cluster with what the calibration knows."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self.cluster = cluster
        self.calibration = calibration

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
            device.flops_per_s * PRIORS[Op.GEMM].efficiency
            / (device.memory_bytes_per_s * PRIORS[Op.DECODE_GEMM].efficiency),
        )  # fmt: skip
        slowdown = self._slowdown(active_workers_on_node)
        per_task: dict[str, float] = {}
        operations: dict[str, tuple[float, float]] = {}
        for task in tasks:
            if task.model_stage != model_stage:
                continue
            bill = TASK_BILLS[task.kind](setting)
            spent = self._price(bill.work, accelerator, slowdown)
            spent[BUBBLE] = (0.0, sum(s for _, s in self._price(bill.bubble, accelerator, slowdown).values()))
            per_task[task.name] = sum(seconds for _, seconds in spent.values())
            for name, (work, seconds) in spent.items():
                if work or seconds:
                    before = operations.get(name, (0.0, 0.0))
                    operations[name] = (before[0] + work, before[1] + seconds)
        return StageCost(sum(per_task.values()), per_task, operations)

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
        name = accelerator or self.cluster.accelerators[0].name
        return sum(seconds for _, seconds in self._price(bill, name, 1.0).values())

    def _slowdown(self, active_workers: int | None) -> float:
        """How much longer computing takes because workers share the cores of their node."""
        cores = self.cluster.cores_per_node
        return max(1.0, active_workers / cores) if cores and active_workers else 1.0

    def _price(self, bill: Bill, accelerator: str, slowdown: float) -> dict[str, tuple[float, float]]:
        """{class: (work, seconds)}."""
        result: dict[str, tuple[float, float]] = {}
        for key, work, calls in bill:
            fixed, per_work = self.calibration.line(key, accelerator)
            seconds = calls * fixed + work * per_work
            if key[0] in COMPUTE or key[0] in MEMORY or key[0] is Op.LAUNCH:
                seconds *= slowdown
            result[key_name(key)] = (work, seconds)
        return result


def _update_bill(at: _Setting) -> TaskBill:
    """All optimizer updates of a step: `epochs` x `mini_batches`, each over its share of the samples."""
    work = at.workload
    micro_batches, tokens = _micro_batches(at, work.num_samples / work.mini_batches)
    updates = work.epochs * work.mini_batches
    one = _pipeline_stage(at, tokens, backward=True)
    result = TaskBill.empty()
    result.work.add_bill(one, micro_batches * updates)
    result.bubble.add_bill(one, (at.layout.pp - 1) * updates)
    result.work.add_bill(_update_once(at), updates)
    return result


def _update_once(at: _Setting) -> Bill:
    """Gradient reduction over the units and one Adam update of the rank's flat buffers."""
    bill, pp, wide = Bill(), at.layout.pp, at.precision.wide_bytes
    numel = max(state_numel(at.spec, at.layout, pp_rank) for pp_rank in (0, pp - 1))
    add_collective(bill, Op.ALL_REDUCE, numel * wide, 1, at.dp, at.span.dp_link)
    bill.add(Op.ELEMENTWISE, numel * (OPTIMIZER_PASSES * wide + 2 * at.precision.param_bytes), OPTIMIZER_PASSES)
    bill.add(Op.LAUNCH, 0, 1)
    return bill


def _forward_bill(at: _Setting) -> TaskBill:
    """A forward pass over all samples of a step: log-probabilities, values or scores."""
    micro_batches, tokens = _micro_batches(at, at.workload.num_samples)
    one = _pipeline_stage(at, tokens, backward=False)
    result = TaskBill.empty()
    result.work.add_bill(one, micro_batches)
    result.bubble.add_bill(one, at.layout.pp - 1)
    result.work.add(Op.LAUNCH, 0, 1)
    return result


def _micro_batches(at: _Setting, samples: float) -> tuple[int, Tokens]:
    """(number of micro-batches, mean content of one) of the slowest unit, given the samples all units share."""
    work, unit_samples = at.workload, max(1, -(-int(samples) // at.dp))
    count = -(-unit_samples // at.micro_batch)
    each = unit_samples / count
    response = _slowest_mean(work, unit_samples, at.dp)
    length = work.prompt_tokens + response
    spread = work.response.mean_square - work.response.mean**2
    pairs = causal_pairs(length, at.shape.window) + (0.0 if at.shape.window else spread / 2)
    return count, Tokens(each * length, each * pairs, each * response)


def _slowest_mean(work: Workload, unit_samples: int, dp: int) -> float:
    """Expected largest mean response length among `dp` units of random samples (normal order statistic, Blom 1958)."""
    mean = work.response.mean
    if dp == 1:
        return mean
    quantile = statistics.NormalDist().inv_cdf((dp - 0.375) / (dp + 0.25))
    return min(mean + quantile * work.response.deviation / math.sqrt(unit_samples), work.response.longest)


def _pipeline_stage(at: _Setting, tokens: Tokens, *, backward: bool) -> Bill:
    """One micro-batch through the slowest pipeline stage: the last, which has most layers and the head."""
    tp, pp, value_bytes, link = at.layout.tp, at.layout.pp, at.precision.param_bytes, at.span.tp_link
    layers = len(layer_range(at.shape.layers, pp, pp - 1))
    forward = layer_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    ends = head_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    if pp == 1:
        ends.add_bill(embedding_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link))
    bill = forward.scaled(layers)
    bill.add_bill(ends)
    if backward:
        bill.add_bill(layer_backward(forward), layers)
        bill.add_bill(layer_backward(ends))
        if at.recompute is Recompute.FULL:
            bill.add_bill(forward, layers)
        elif at.recompute is Recompute.SELECTIVE:
            bill.add(Op.ELEMENTWISE, forward.entries[(Op.ELEMENTWISE, None)][0] * layers / 2, 3 * layers)
    if pp > 1:
        passes = 2 if backward else 1
        bill.add(Op.POINT_TO_POINT, passes * tokens.count * at.shape.hidden * value_bytes, passes, at.span.pp_link)
    bill.add(Op.LAUNCH, 0, 2 if backward else 1)
    return bill


def _generate_bill(at: _Setting) -> TaskBill:
    """Prefill of all prompts and decoding with a batch that shrinks, on the unit whose sequences last longest.

    With fewer slots than samples a finished sequence's slot is refilled: the batch stays full for
    (samples - slots) * mean length / slots steps, then shrinks like a fresh batch of `slots` samples.
    """
    work, samples = at.workload, max(1, -(-at.workload.num_samples // at.dp))
    slots = min(max(1, at.micro_batch), samples)
    result, mean = TaskBill.empty(), at.workload.response.mean
    _add_prefill(result.work, at, samples, slots)
    full_steps = (samples - slots) * mean / slots
    phases = [(full_steps, float(slots), work.prompt_tokens + mean / 2)]
    for start, end, alive in _segments(work.response.values):
        some_alive = 1 - (1 - alive) ** (slots * at.dp)
        phases.append(((end - start) * some_alive, max(1.0, slots * alive), work.prompt_tokens + (start + end) / 2))
    bound_by_memory = [phase for phase in phases if not _compute_bound(phase[1], at)]
    bound_by_compute = [phase for phase in phases if _compute_bound(phase[1], at)]
    for part in (bound_by_memory, bound_by_compute):
        _add_decode(result.work, at, part)
    result.work.add(Op.LAUNCH, 0, 1)
    return result


@functools.lru_cache(maxsize=64)
def _segments(values: tuple[float, ...]) -> list[tuple[float, float, float]]:
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


def _add_prefill(bill: Bill, at: _Setting, samples: int, slots: int) -> None:
    prompt = at.workload.prompt_tokens
    tp, value_bytes, link = at.layout.tp, at.precision.param_bytes, at.span.tp_link
    tokens = Tokens.of(slots, prompt, loss_length=1, window=at.shape.window)
    passes = samples / slots
    layer = layer_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    bill.add_bill(layer, at.shape.layers * passes)
    bill.add_bill(head_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link), passes)
    _add_hops(bill, at, tokens.count, passes)


def _add_decode(bill: Bill, at: _Setting, phases: list[tuple[float, float, float]]) -> None:
    """Decode steps of (steps, batch, context) phases on one side of the roofline; counts are linear in all three."""
    steps = sum(phase[0] for phase in phases)
    if not steps:
        return
    window = at.shape.window
    tokens = sum(count * batch for count, batch, _ in phases)
    seen = sum(count * batch * (min(context, window) if window else context) for count, batch, context in phases)
    one = decode_step(
        at.shape, batch=tokens / steps, context=seen / tokens, tp=at.layout.tp, value_bytes=at.precision.param_bytes,
        tp_link=at.span.tp_link, compute_bound=_compute_bound(phases[0][1], at),
    )  # fmt: skip
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


TASK_BILLS: dict[Kind, Callable[[_Setting], TaskBill]] = {
    Kind.GENERATE: _generate_bill,
    Kind.LOGPROBS: _forward_bill,
    Kind.VALUES: _forward_bill,
    Kind.SCORES: _forward_bill,
    Kind.UPDATE: _update_bill,
}
"""Who counts the operations of which kind of task."""
