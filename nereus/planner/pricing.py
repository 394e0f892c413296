"""Prices every candidate of a model-stage at once: the cost and memory models as matrices.

`cost` prices one candidate and is the definition; here its counts, which are linear in tokens, pairs and calls, are
taken once per layout, turned into seconds, and spread over all (tp, pp) x (dp, micro-batch) by products of small
matrices. A test holds the two together.
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from nereus.cluster import Accelerator, Link
from nereus.model import ModelSpec
from nereus.plan import Layout, ModelStage, Role, Stage
from nereus.planner.bounds import Options
from nereus.planner.calibration import PRIORS
from nereus.planner.candidates import RECOMPUTES, Candidates, Floats, Ints
from nereus.planner.cost import ON_DEVICE, OPTIMIZER_PASSES, CostModel, Span, pipeline_basis, segments, slowest_mean
from nereus.planner.footprints import LayoutTable, footprints, layout_table, smallest_state
from nereus.planner.memory import Precision, Recompute
from nereus.planner.operations import (
    COLUMN,
    Counts,
    Op,
    Shape,
    Tokens,
    causal_pairs,
    decode_step,
    head_forward,
    hops,
    layer_forward,
)
from nereus.planner.placement import Line, Region
from nereus.planner.workload import Workload
from nereus.workflow import Kind, Workflow

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Which layouts, dp and micro-batches are tried.

    paper: tp and pp powers of two, and only dp and micro-batches that divide the batch. Otherwise tp is any divisor
    of the query heads up to a node, pp any number up to the layers, dp any count that gives the fullest unit fewer
    samples than every smaller count does, the micro-batch a power of two or all samples of a unit.
    """

    paper: bool = False

    def layouts(self, spec: ModelSpec, line: Line) -> tuple[tuple[int, int], ...]:
        return tuple(
            (tp, pp)
            for tp in spec.valid_tp
            if tp <= line.max_node and self._admits(tp)
            for pp in range(1, min(spec.num_layers, line.groups_fit(tp)) + 1)
            if self._admits(pp)
        )

    def _admits(self, count: int) -> bool:
        return not self.paper or count & (count - 1) == 0

    def replicas(self, totals: Iterable[int], limit: int) -> list[int]:
        """Data-parallel counts up to `limit` for a model-stage whose tasks share out so many samples."""
        found: set[int] = set()
        for total in totals:
            if self.paper:
                found.update(dp for dp in range(1, min(limit, total) + 1) if total % dp == 0)
            else:
                found.update(dp for dp in _useful_counts(total) if dp <= limit)
        return sorted(found)

    def micro_batches(self, samples: int) -> list[int]:
        """Micro-batch sizes of a unit with so many samples."""
        powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
        if self.paper:
            powers = [size for size in powers if samples % size == 0]
        return [*powers, samples]


@functools.lru_cache(maxsize=64)
def _useful_counts(total: int) -> tuple[int, ...]:
    """The counts among which `total` samples divide into smaller largest shares than among any fewer."""
    found, share = [], 0
    for dp in range(1, total + 1):
        if -(-total // dp) != share:
            share = -(-total // dp)
            found.append(dp)
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Pricing:
    """What prices depend on, for all model-stages: the job, the machine, and what is known of it."""

    workflow: Workflow
    specs: dict[Role, ModelSpec]
    workload: Workload
    precision: Precision
    cost: CostModel
    line: Line
    space: Space = Space()

    @property
    def waves(self) -> dict[str, int]:
        """Wave of each task: the length of the longest chain of tasks before it."""
        return waves_of(self.workflow)

    def sketch(self, model_stage: ModelStage, *, in_turn: bool) -> "Sketch":
        """Everything the model-stage could do on this line, in the fewest seconds it could take."""
        return Sketch(self, model_stage, in_turn=in_turn)

    def candidates(self, model_stage: ModelStage, *, in_turn: bool) -> Candidates:
        """Every candidate of the model-stage that fits a device by itself."""
        sketch = self.sketch(model_stage, in_turn=in_turn)
        return sketch.candidates(np.full(len(sketch), True))

    @property
    def sync_price(self) -> "WeightSync":
        return WeightSync(self)


class WeightSync:
    """Prices of weight synchronizations, as `CostModel.sync_seconds`, for many targets at once."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        line, cost = pricing.line, pricing.cost
        link = Link.INTRA_NODE if len(line.node_sizes) == 1 else Link.INTER_NODE
        hop, launch = COLUMN[(Op.POINT_TO_POINT, link)], COLUMN[(Op.LAUNCH, None)]
        types = [region.accelerator for region in line.regions[::2]]
        lines = np.stack([cost.lines(name, None) for name in types])
        self._work, self._call, self._launch = lines[:, 0, hop], lines[:, 1, hop], lines[:, 1, launch]

    def matrix(self, source: ModelStage, sources: Candidates, targets: Candidates) -> Floats:
        """[sources, targets]: seconds from each candidate of a model-stage to each of another's."""
        spec, wide = self.pricing.specs[source.role], self.pricing.precision.param_bytes
        sent = np.multiply.outer(spec.num_params * wide / sources.num_devices, targets.dp)
        moved = np.maximum(self._received(spec, targets), sent)
        pieces = np.maximum(1, sources.tp[:, None] // targets.tp) * (spec.num_layers / targets.pp)
        if len(self._work) == 1:
            return np.asarray(moved * self._work[0] + pieces * self._call[0] + self._launch[0])
        slower = np.maximum(targets.region // 2, sources.region[:, None] // 2)
        seconds: Floats = moved * self._work[slower] + pieces * self._call[slower] + self._launch[slower]
        return seconds

    def _received(self, spec: ModelSpec, targets: Candidates) -> Ints:
        layouts, numbers = _numbered(targets.tp, targets.pp)
        result: Ints = layout_table(spec, layouts).largest_numel[numbers] * self.pricing.precision.param_bytes
        return result


def waves_of(workflow: Workflow) -> dict[str, int]:
    """Wave of each task: the length of the longest chain of tasks before it."""
    waves: dict[str, int] = {}
    for task in workflow.tasks:
        waves[task.name] = max((waves[before] + 1 for before in task.after), default=0)
    return waves


def _numbered(tp: Ints, pp: Ints) -> tuple[tuple[tuple[int, int], ...], Ints]:
    """The distinct (tp, pp) pairs of two columns, and the number of each row's pair among them."""
    keys, numbers = np.unique(tp * (1 << 20) + pp, return_inverse=True)
    return tuple((int(key) >> 20, int(key) & ((1 << 20) - 1)) for key in keys), numbers


@functools.lru_cache(maxsize=128)
def _pass_counts(
    shape: Shape, layouts: tuple[tuple[int, int], ...], value_bytes: int, span: Span, backward: Recompute | None
) -> Counts:
    """[layouts, 4, 2, classes]: counts of a pipeline pass without tokens, per token, per pair and per loss token."""
    return np.stack(
        [np.stack(pipeline_basis(shape, Layout(tp=tp, pp=pp), value_bytes, span, backward)) for tp, pp in layouts]
    )


@functools.lru_cache(maxsize=256)
def _decode_counts(shape: Shape, tp: int, value_bytes: int, link: Link, compute_bound: bool) -> Counts:
    """[3, 2, classes]: counts of a decode step without tokens, per token, and per token and token of context."""

    def counts(batch: int, context: int) -> Counts:
        return decode_step(
            shape, batch=batch, context=context, tp=tp, value_bytes=value_bytes, tp_link=link,
            compute_bound=compute_bound,
        ).counts  # fmt: skip

    return np.stack([counts(0, 0), counts(1, 0) - counts(0, 0), counts(1, 1) - counts(1, 0)])


@functools.lru_cache(maxsize=256)
def _prefill_counts(shape: Shape, tp: int, value_bytes: int, link: Link, prompt: float) -> Counts:
    """[2, 2, classes]: counts of prefilling nothing, and of each prompt more."""

    def counts(samples: int) -> Counts:
        tokens = Tokens.of(samples, prompt, loss_length=1, window=shape.window)
        bill = layer_forward(shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link).scaled(shape.layers)
        bill.add_bill(head_forward(shape, tokens, tp=tp, tp_link=link))
        return bill.counts

    return np.stack([counts(0), counts(1) - counts(0)])


@functools.lru_cache(maxsize=64)
def _contents(work: Workload, window: int | None, samples: int, dps: bytes, sizes: bytes) -> tuple[Floats, Ints]:
    """([4, settings]: 1, tokens, pairs and loss tokens of a micro-batch; [settings]: micro-batches of a unit).

    dps, sizes: data-parallel count and micro-batch of each setting, as the bytes of arrays.
    """
    dp, micro_batch = np.frombuffer(dps, dtype=np.int64), np.frombuffer(sizes, dtype=np.int64)
    unit = np.maximum(1, -(-samples // dp))
    count = -(-unit // micro_batch)
    each = unit / count
    spread = 0.0 if window else (work.response.mean_square - work.response.mean**2) / 2
    counts, first, number = np.unique(dp, return_index=True, return_inverse=True)
    shares = zip(counts.tolist(), unit[first].tolist(), strict=True)
    means = [slowest_mean(work, share, at) for at, share in shares]
    response = np.array(means)[number]
    pairs = np.array([causal_pairs(work.prompt_tokens + mean, window) for mean in means])[number]
    content = np.stack(
        [np.ones(len(each)), each * (work.prompt_tokens + response), each * (pairs + spread), each * response]
    )
    return content, count


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Family:
    """Candidates that differ in layout, dp and micro-batch alone.

    region: its index. grain: [layouts] devices that must stay in one node. at, setting: [rows] numbers of the layout
    and of the (dp, micro-batch) pair of each row.
    """

    region: int
    layouts: tuple[tuple[int, int], ...]
    table: LayoutTable
    grain: Ints
    span: Span
    at: Ints
    setting: Ints
    seconds: Floats

    def __len__(self) -> int:
        return len(self.at)


class Sketch:
    """What a model-stage could do and the seconds of each possibility without recomputation; memory comes later.

    Recomputation only adds time, so `seconds` bounds every candidate made from a row.
    """

    def __init__(self, pricing: Pricing, model_stage: ModelStage, *, in_turn: bool) -> None:
        self.pricing, self.model_stage, self.in_turn = pricing, model_stage, in_turn
        self.spec = pricing.specs[model_stage.role]
        self.shape, self.workload = Shape.of(self.spec), pricing.workload
        self.value_bytes = pricing.precision.param_bytes
        self.tasks = [task for task in pricing.workflow.tasks if task.model_stage == model_stage]
        self.trains = model_stage.stage is Stage.TRAINING
        self.layouts = pricing.space.layouts(self.spec, pricing.line)
        self.dp, self.micro_batch = self._settings()
        self.alone = sum(m.stage is model_stage.stage for m in pricing.workflow.model_stages) == 1
        self.families = [
            self._family(index, region, layouts, grains, span)
            for index, region in enumerate(pricing.line.regions)
            for layouts, grains, span in self._variants(region)
            if layouts
        ]

    def __len__(self) -> int:
        return sum(map(len, self.families))

    @property
    def unit_total(self) -> int:
        """Samples that the units share out at once and that bound the micro-batch."""
        work = self.workload
        return -(-work.num_samples // work.mini_batches) if self.trains else work.num_samples

    def _settings(self) -> tuple[Ints, Ints]:
        """[settings] each: dp and micro-batch."""
        work, space, line = self.workload, self.pricing.space, self.pricing.line
        totals = {work.num_samples, -(-work.num_samples // work.mini_batches)}
        pairs = [
            (dp, size)
            for dp in space.replicas(totals, min(self.unit_total, line.num_devices))
            for size in space.micro_batches(-(-self.unit_total // dp))
        ]
        columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def _variants(self, region: Region) -> list[tuple[tuple[tuple[int, int], ...], list[int], Span]]:
        """(layouts, devices that must stay in one node, links) of the ways to lie in a region.

        Where a whole unit fits in a node, it may be kept there, or only its tensor-parallel groups.
        """
        size, inter = self.pricing.line.max_node, Link.INTER_NODE
        if region.one_node:
            small = tuple((tp, pp) for tp, pp in self.layouts if tp * pp <= size)
            return [(small, [tp for tp, _ in small], Span())]
        if len(self.pricing.line.node_sizes) == 1:
            return []
        whole = tuple((tp, pp) for tp, pp in self.layouts if pp > 1 and tp * pp <= size)
        return [
            (self.layouts, [tp for tp, _ in self.layouts], Span(pp_link=inter, dp_link=inter)),
            (whole, [tp * pp for tp, pp in whole], Span(dp_link=inter)),
        ]

    def _family(
        self, index: int, region: Region, layouts: tuple[tuple[int, int], ...], grains: list[int], span: Span
    ) -> _Family:
        """What may lie on blocks of one region, where the state alone fits a device."""
        line, table = self.pricing.line, layout_table(self.spec, layouts)
        grain = np.array(grains, dtype=np.int64)
        fit = np.array([line.groups_fit(size) * size for size in grains], dtype=np.int64)
        limit = np.minimum(fit, line.max_node if region.one_node else line.num_devices)
        limit[smallest_state(self.trains, table, self.pricing.precision) > line.max_capacity] = 0
        devices = (table.tp * table.pp)[:, None] * self.dp[None, :]
        possible = devices <= limit[:, None]
        if not region.one_node:
            possible &= devices > grain[:, None]
        at, setting = np.nonzero(possible)
        family = _Family(index, layouts, table, grain, span, at, setting, np.zeros(0))
        return dataclasses.replace(family, seconds=self._seconds(family, at, setting, Recompute.NONE))

    def options(self) -> Options:
        """Devices and fewest seconds of every row."""
        families = self.families
        devices = [(f.table.tp * f.table.pp)[f.at] * self.dp[f.setting] for f in families]
        seconds = [f.seconds for f in families]
        if not families:
            return Options(np.zeros(0, dtype=np.int64), np.zeros((0, self.num_waves)))
        return Options(np.concatenate(devices), np.concatenate(seconds))

    def powers_of_two(self) -> Mask:
        """The rows whose layout and dp are powers of two."""
        masks = [np.zeros(0, dtype=bool)]
        for family in self.families:
            single = [_power_of_two(values) for values in (family.table.tp, family.table.pp, self.dp)]
            masks.append((single[0] & single[1])[family.at] & single[2][family.setting])
        return np.concatenate(masks)

    @property
    def num_waves(self) -> int:
        return 1 + max(self.pricing.waves.values())

    def candidates(self, keep: Mask) -> Candidates:
        """The candidates made from the rows to keep that fit a device by themselves."""
        found, first = [Candidates.of(self.model_stage, [], num_waves=self.num_waves)], 0
        for family in self.families:
            rows = np.flatnonzero(keep[first : first + len(family)])
            first += len(family)
            for number, recompute in enumerate(RECOMPUTES if self.trains else RECOMPUTES[:1]):
                found.append(self._fitting(family, rows, number, recompute))
        return Candidates.concatenate(found)

    def _fitting(self, family: _Family, rows: Ints, number: int, recompute: Recompute) -> Candidates:
        at, setting = family.at[rows], family.setting[rows]
        held = footprints(
            self.model_stage, self.spec, family.table, at, dp=self.dp[setting], micro_batch=self.micro_batch[setting],
            workload=self.workload, recompute=recompute, precision=self.pricing.precision,
        )  # fmt: skip
        fits = np.flatnonzero(np.minimum(held.active, held.shared_active) <= self.pricing.line.max_capacity)
        at, setting = at[fits], setting[fits]
        if recompute is Recompute.NONE:
            seconds = family.seconds[rows[fits]]
        else:
            seconds = self._seconds(family, at, setting, recompute)
        return Candidates(
            self.model_stage,
            tp=family.table.tp[at],
            pp=family.table.pp[at],
            dp=self.dp[setting],
            grain=family.grain[at],
            micro_batch=self.micro_batch[setting],
            recompute=np.full(len(fits), number, dtype=np.int64),
            region=np.full(len(fits), family.region, dtype=np.int64),
            seconds=seconds,
            active=held.active[fits],
            idle=held.idle[fits],
            shared_active=held.shared_active[fits],
            shared_idle=held.shared_idle[fits],
        )

    def _seconds(self, family: _Family, at: Ints, setting: Ints, recompute: Recompute) -> Floats:
        """[rows, waves]."""
        waves, cost = self.pricing.waves, self.pricing.cost
        accelerator = self.pricing.line.regions[family.region].accelerator
        job = _TaskPrice(self, family, at, setting, recompute, cost.cluster.accelerator(accelerator))
        lines = cost.lines(accelerator, None)
        seconds = np.zeros((len(at), self.num_waves))
        for task in self.tasks:
            seconds[:, waves[task.name]] += job.price(task.kind, lines)
        if cost.cluster.cores_per_node:
            devices = (family.table.tp * family.table.pp)[at] * self.dp[setting]
            crowding = np.maximum(1.0, self._workers(devices) / cost.cluster.cores_per_node) - 1.0
            on_device = np.where(ON_DEVICE, lines, 0.0)
            for task in self.tasks:
                seconds[:, waves[task.name]] += crowding * job.price(task.kind, on_device)
        return seconds

    def _workers(self, devices: Ints) -> Ints:
        """Processor workers that compute at once on a node: its own where nothing runs beside it, else all."""
        node = self.pricing.line.max_node
        return np.minimum(devices, node) if self.alone or self.in_turn else np.full(len(devices), node)


def _power_of_two(values: Ints) -> Mask:
    result: Mask = (values & (values - 1)) == 0
    return result


class _TaskPrice:
    """Seconds of one task for rows of (layout, setting)."""

    def __init__(
        self,
        stage: Sketch,
        family: _Family,
        at: Ints,
        setting: Ints,
        recompute: Recompute,
        accelerator: Accelerator,
    ) -> None:
        """`accelerator` says up to which batch decoding is bound by memory."""
        self.stage, self.layouts, self.table, self.span = stage, family.layouts, family.table, family.span
        self.balance = (accelerator.flops_per_s * PRIORS[Op.GEMM].efficiency) / (
            accelerator.memory_bytes_per_s * PRIORS[Op.DECODE_GEMM].efficiency
        )
        self.recompute, self.at, self.setting = recompute, at, setting
        self.workload, self.dp, self.micro_batch = stage.workload, stage.dp, stage.micro_batch

    def price(self, kind: Kind, lines: Counts) -> Floats:
        if kind is Kind.GENERATE:
            return self._generate(lines)
        if kind is Kind.UPDATE:
            return self._update(lines)
        launch = lines[1, COLUMN[(Op.LAUNCH, None)]]
        seconds: Floats = self._passes(lines, self.workload.num_samples, None) + launch
        return seconds

    def _update(self, lines: Counts) -> Floats:
        work, precision, wide = self.workload, self.stage.pricing.precision, self.stage.pricing.precision.wide_bytes
        updates = work.epochs * work.mini_batches
        passes = self._passes(lines, int(work.num_samples / work.mini_batches), self.recompute)
        reduce = COLUMN[(Op.ALL_REDUCE, self.span.dp_link)]
        adam, launch = COLUMN[(Op.ELEMENTWISE, None)], COLUMN[(Op.LAUNCH, None)]
        counts = np.unique(self.dp)
        steps = np.zeros(int(counts.max(initial=1)) + 1)
        steps[counts] = [hops(dp) for dp in counts.tolist()]
        dp, numel = self.dp[self.setting], self.table.ends_numel[self.at]
        sent = 2 * (dp - 1) / dp * numel * wide
        if self.span.dp_link is Link.INTER_NODE:
            ranks = self.table.tp[self.at] * self.table.pp[self.at]
            sent = sent / np.minimum(dp, np.maximum(1, self.stage.pricing.cost.devices_per_node // ranks))
        once = sent * lines[0, reduce] + steps[dp] * lines[1, reduce]
        per_element = OPTIMIZER_PASSES * wide + 2 * precision.param_bytes
        once = once + numel * per_element * lines[0, adam] + OPTIMIZER_PASSES * lines[1, adam] + lines[1, launch]
        result: Floats = updates * (passes + once)
        return result

    def _passes(self, lines: Counts, samples: int, backward: Recompute | None) -> Floats:
        """All micro-batches of a unit through its slowest pipeline stage, and the bubble."""
        counts = _pass_counts(self.stage.shape, self.layouts, self.stage.value_bytes, self.span, backward)
        per = np.tensordot(counts, lines, axes=2)
        window, settings = self.stage.shape.window, (self.dp.tobytes(), self.micro_batch.tobytes())
        content, micro_batches = _contents(self.workload, window, samples, *settings)
        one = (per @ content)[self.at, self.setting]
        result: Floats = one * (micro_batches[self.setting] + self.table.pp[self.at] - 1)
        return result

    def _generate(self, lines: Counts) -> Floats:
        """Prefill and decoding: seconds are linear in passes, prompts, and each side's steps, tokens and context."""
        samples = np.maximum(1, -(-self.workload.num_samples // self.dp))
        slots = np.minimum(self.micro_batch, samples)
        per, amounts = [self._prefill_seconds(lines)], [samples / slots, samples.astype(np.float64)]
        *phases, bound = self._phases(samples, slots)
        for compute_bound in (False, True):
            amounts += [np.where(bound == compute_bound, part, 0.0).sum(axis=0) for part in phases]
            per.append(self._decode_seconds(lines, compute_bound))
        grid = np.concatenate(per, axis=1) @ np.stack(amounts)
        result: Floats = grid[self.at, self.setting] + lines[1, COLUMN[(Op.LAUNCH, None)]]
        return result

    def _prefill_seconds(self, lines: Counts) -> Floats:
        """[layouts, 2]: seconds of a prefill pass, and of each prompt in it."""
        shape, value_bytes, prompt = self.stage.shape, self.stage.value_bytes, self.workload.prompt_tokens
        link = self.span.tp_link
        counts = {tp: _prefill_counts(shape, tp, value_bytes, link, prompt) for tp in {tp for tp, _ in self.layouts}}
        per = np.stack([np.tensordot(counts[tp], lines, axes=2) for tp, _ in self.layouts])
        per[:, 1] /= self.table.pp
        per_pass, per_token = self._hop_seconds(lines)
        per[:, 0] += per_pass
        per[:, 1] += per_token * prompt
        return per

    def _decode_seconds(self, lines: Counts, compute_bound: bool) -> Floats:
        """[layouts, 3]: seconds of a decode step, of each token in it, and of each token of context one attends to."""
        shape, value_bytes, link = self.stage.shape, self.stage.value_bytes, self.span.tp_link
        counts = {
            tp: _decode_counts(shape, tp, value_bytes, link, compute_bound) for tp in {t for t, _ in self.layouts}
        }
        per = np.stack([np.tensordot(counts[tp], lines, axes=2) for tp, _ in self.layouts])
        per[:, 1:] /= self.table.pp[:, None]
        per_pass, per_token = self._hop_seconds(lines)
        per[:, 0] += per_pass + self.table.pp * lines[1, COLUMN[(Op.LAUNCH, None)]]
        per[:, 1] += per_token
        return per

    def _hop_seconds(self, lines: Counts) -> tuple[Floats, Floats]:
        """([layouts] each) seconds to hand activations along the pipeline: of a pass, and of each token in it."""
        hop, pp = COLUMN[(Op.POINT_TO_POINT, self.span.pp_link)], self.table.pp
        per_token = (pp - 1) * (self.stage.shape.hidden * self.stage.value_bytes * lines[0, hop])
        return np.where(pp > 1, pp * lines[1, hop], 0.0), per_token

    def _phases(self, samples: Ints, slots: Ints) -> tuple[Floats, Floats, Floats, Mask]:
        """Decode phases of each setting, [phases, settings]: steps, tokens, tokens x context, compute-bound or not."""
        work, window = self.workload, self.stage.shape.window
        mean, dp = work.response.mean, self.dp
        steps: list[Floats] = [(samples - slots) * mean / slots]
        batch: list[Floats] = [slots.astype(np.float64)]
        context = [work.prompt_tokens + mean / 2]
        for start, end, alive in segments(work.response.values):
            steps.append(np.asarray((end - start) * (1 - (1 - alive) ** (slots * dp)), dtype=np.float64))
            batch.append(np.maximum(1.0, slots * alive).astype(np.float64))
            context.append(work.prompt_tokens + (start + end) / 2)
        seen = np.array([min(c, window) if window else c for c in context])
        all_steps, all_batch = np.stack(steps), np.stack(batch)
        tokens = all_steps * all_batch
        bound = 2 * all_batch >= self.balance * self.stage.value_bytes
        return all_steps, tokens, tokens * seen[:, None], bound
