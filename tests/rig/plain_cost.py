"""Seconds of one model-stage under one setting, counted task by task: what the planner's columns are held to."""

import dataclasses

from nereus.cluster import Link
from nereus.engine_facts import Op, Precision, causal_pairs
from nereus.model import ModelSpec
from nereus.plan import Layout, Recompute
from nereus.planner.prices.cost import StageCost, TaskCost
from nereus.planner.prices.memory import state_numel
from nereus.planner.prices.operations import (
    Bill,
    Shape,
    Tokens,
    add_collective,
    decode_step,
    head_forward,
    layer_forward,
)
from nereus.planner.prices.passes import Span, pipeline_pass
from nereus.planner.prices.task_prices import OPTIMIZER_PASSES, machine_balance
from nereus.planner.workload import Workload, segments, slowest_mean
from nereus.workflow import Kind


def stage_seconds(
    model, model_stage, spec, layout, *, dp, workload, micro_batch, recompute, precision, tasks, accelerator, span,
    active_workers_on_node=None,
):  # fmt: skip
    """As `CostModel.stage_seconds` of `model`."""
    setting = _Setting(
        Shape.of(spec), spec, layout, dp, workload, micro_batch, recompute, precision, span,
        machine_balance(model.cluster.accelerator(accelerator)), max(1, model.devices_per_node // layout.num_ranks),
    )  # fmt: skip
    lines = model.lines(accelerator, active_workers_on_node)
    costs = {}
    for task in tasks:
        if task.model_stage == model_stage:
            work, bubble = TASK_BILLS[task.kind](setting)
            costs[task.name] = TaskCost(work, bubble, float(((work.counts + bubble.counts) * lines).sum()))
    return StageCost(costs, lines)


def sync_seconds(model, spec, source, target, *, same_node, precision):
    """As `CostModel.sync_seconds` of `model`: the busier side bounds the time."""
    (source_layout, source_dp), (target_layout, target_dp) = source, target
    whole = spec.num_params * precision.param_bytes
    received = max(state_numel(spec, target_layout, p) for p in range(target_layout.pp)) * precision.param_bytes
    sent = target_dp * whole / (source_dp * source_layout.num_ranks)
    bill = Bill()
    pieces = spec.num_layers * max(1, source_layout.tp // target_layout.tp) / target_layout.pp
    bill.add(Op.POINT_TO_POINT, max(received, sent), pieces, Link.INTRA_NODE if same_node else Link.INTER_NODE)
    bill.add(Op.LAUNCH, 0, 1)
    return float((bill.counts * model.lines(model.cluster.accelerators[0].name, None)).sum())


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


def _update_bill(at):
    """All optimizer updates of a step: `epochs` x `mini_batches`, each over its share of the samples."""
    work = at.workload
    micro_batches, tokens = _micro_batches(at, work.mini_batch_samples)
    updates = work.epochs * work.mini_batches
    one = _pipeline_stage(at, tokens, backward=True)
    total = one.scaled(micro_batches * updates)
    total.add_bill(_update_once(at), updates)
    return total, one.scaled((at.layout.pp - 1) * updates)


def _update_once(at):
    """Gradient reduction over the units and one Adam update of the rank's flat buffers."""
    bill, pp, wide = Bill(), at.layout.pp, at.precision.wide_bytes
    numel = max(state_numel(at.spec, at.layout, pp_rank) for pp_rank in (0, pp - 1))
    add_collective(bill, Op.ALL_REDUCE, numel * wide, 1, at.dp, at.span.dp_link, ranks_per_node=at.units_per_node)
    bill.add(Op.ELEMENTWISE, numel * (OPTIMIZER_PASSES * wide + 2 * at.precision.param_bytes), OPTIMIZER_PASSES)
    bill.add(Op.LAUNCH, 0, 1)
    return bill


def _forward_bill(at):
    """A forward pass over all samples of a step: log-probabilities, values or scores."""
    micro_batches, tokens = _micro_batches(at, at.workload.num_samples)
    one = _pipeline_stage(at, tokens, backward=False)
    total = one.scaled(micro_batches)
    total.add(Op.LAUNCH, 0, 1)
    return total, one.scaled(at.layout.pp - 1)


def _micro_batches(at, samples):
    """(number of micro-batches, mean content of one) of the slowest unit, given the samples all units share."""
    work, unit_samples = at.workload, max(1, -(-int(samples) // at.dp))
    count = -(-unit_samples // at.micro_batch)
    each = unit_samples / count
    response = slowest_mean(work, unit_samples, at.dp)
    length = work.prompt_tokens + response
    spread = work.response.mean_square - work.response.mean**2
    pairs = causal_pairs(length, at.shape.window) + (0.0 if at.shape.window else spread / 2)
    return count, Tokens(each * length, each * pairs, each * response)


def _pipeline_stage(at, tokens, *, backward):
    """One micro-batch through the slowest pipeline stage: the last, which has most layers and the head."""
    value_bytes = at.precision.param_bytes
    return pipeline_pass(at.shape, at.layout, value_bytes, at.span, at.recompute if backward else None, tokens)


def _generate_bill(at):
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


def _add_prefill(bill, at, samples, slots):
    prompt = at.workload.prompt_tokens
    tp, value_bytes, link = at.layout.tp, at.precision.param_bytes, at.span.tp_link
    tokens = Tokens.of(slots / at.layout.pp, prompt, loss_length=1, window=at.shape.window)
    passes = samples / slots
    layer = layer_forward(at.shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    bill.add_bill(layer, at.shape.layers * passes)
    bill.add_bill(head_forward(at.shape, tokens, tp=tp, tp_link=link), passes)
    _add_hops(bill, at, slots * prompt, passes)


def _add_decode(bill, at, phases):
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


def _compute_bound(batch, at):
    """Whether multiplying `batch` tokens takes longer than reading the weights once."""
    return 2 * batch >= at.machine_balance * at.precision.param_bytes


def _add_hops(bill, at, tokens, passes):
    """Activations handed along the pipeline, and the sampled tokens back to its start."""
    pp = at.layout.pp
    if pp > 1:
        payload = tokens * at.shape.hidden * at.precision.param_bytes * (pp - 1)
        bill.add(Op.POINT_TO_POINT, payload * passes, pp * passes, at.span.pp_link)


TASK_BILLS = {
    Kind.GENERATE: _generate_bill,
    Kind.LOGPROBS: _forward_bill,
    Kind.VALUES: _forward_bill,
    Kind.SCORES: _forward_bill,
    Kind.UPDATE: _update_bill,
}
"""Who counts the operations, and the bubble, of which kind of task."""
