"""Every candidate of a model-stage with its seconds and bytes, on a line of devices.

    rows (kept) -> seconds without recomputation -> memory, and recomputation, of those that are still of interest

`task_prices` and `footprints` hold the formulas, for all candidates at once; `cost.CostModel.stage_seconds` and
`footprints.stage_memory` are one row of them.
"""

import dataclasses
import functools
import math

import numpy as np

from nereus.engine_facts import Precision
from nereus.model import ModelSpec
from nereus.plan import ModelStage, Recompute, Role, Stage
from nereus.planner.prices.cost import ON_DEVICE, CostModel, crowding
from nereus.planner.prices.footprints import footprints, layout_table, smallest_state
from nereus.planner.prices.operations import Shape
from nereus.planner.prices.rows import Family, rows_of
from nereus.planner.prices.syncs import Options, Shapes
from nereus.planner.prices.task_prices import TaskPrices
from nereus.planner.prices.weight_sync import largest_numel, sync_link, sync_seconds
from nereus.planner.space.arrays import Floats, Ints, Mask
from nereus.planner.space.candidates import RECOMPUTES, Candidates, packed
from nereus.planner.space.layouts import Space
from nereus.planner.space.line import Line
from nereus.planner.space.regions import KINDS_OF_A_TYPE, type_of
from nereus.planner.space.settings import amounts_of, pairs_of
from nereus.planner.workload import Workload
from nereus.workflow import Workflow


@dataclasses.dataclass(frozen=True)
class Pricing:
    """What prices depend on, for all model-stages: the job, the machine, and what is known of it."""

    workflow: Workflow
    specs: dict[Role, ModelSpec]
    workload: Workload
    precision: Precision
    cost: CostModel
    line: Line
    space: Space = Space()

    @functools.cached_property
    def _sketches(self) -> "dict[tuple[ModelStage, bool], Sketch]":
        return {}

    @property
    def num_waves(self) -> int:
        return 1 + max(self.workflow.waves.values())

    def sketch(self, model_stage: ModelStage, *, in_turn: bool) -> "Sketch":
        """Everything the model-stage could do on this line, in the fewest seconds it could take.

        in_turn: nothing runs beside it; that matters to processor workers alone, which share cores.
        """
        key = model_stage, in_turn and bool(self.cost.cluster.cores_per_node)
        if key not in self._sketches:
            self._sketches[key] = Sketch(self, model_stage, in_turn=in_turn)
        return self._sketches[key]

    def candidates(self, model_stage: ModelStage, *, in_turn: bool) -> Candidates:
        """Every candidate of the model-stage that fits a device by itself."""
        sketch = self.sketch(model_stage, in_turn=in_turn)
        every = np.arange(len(sketch))
        recomputes = self.space.recomputes if sketch.trains else (Recompute.NONE,)
        table = Candidates.concatenate([sketch.candidates(every, recompute) for recompute in recomputes])
        return table.take(np.minimum(table.active, table.shared_active) <= self.line.max_capacity)

    @functools.cached_property
    def sync_price(self) -> "WeightSync":
        return WeightSync(self)


class Sketch:
    """The rows of one model-stage and their seconds without recomputation, [rows, waves].

    Recomputation only adds time, so `seconds` bounds every candidate made from a row.
    """

    def __init__(self, pricing: Pricing, model_stage: ModelStage, *, in_turn: bool) -> None:
        self.pricing, self.model_stage = pricing, model_stage
        self.spec, work, line = pricing.specs[model_stage.role], pricing.workload, pricing.line
        self.trains = model_stage.stage is Stage.TRAINING
        self.tasks = [task for task in pricing.workflow.tasks if task.model_stage == model_stage]
        alone = sum(m.stage is model_stage.stage for m in pricing.workflow.model_stages) == 1
        self._crowded_by_own = alone or in_turn
        updated = work.mini_batch_samples
        self.pairs = pairs_of(
            pricing.space, model_stage.stage, (work.num_samples, updated),
            updated if self.trains else work.num_samples, line.num_devices,
        )  # fmt: skip
        layouts = pricing.space.layouts(self.spec, line)
        held = smallest_state(self.trains, layout_table(self.spec, layouts), pricing.precision) <= line.max_capacity
        self.rows = rows_of(layouts, tuple(held.tolist()), self.pairs, line.regions, tuple(line.node_sizes))
        self.seconds = np.zeros((len(self.rows), pricing.num_waves))
        for family in self.rows.families:
            own = slice(family.first, family.last)
            self.seconds[own] = self._seconds(family, family.cell, self.rows.devices[own], Recompute.NONE)

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def fastest(self) -> Floats:
        """[waves]: the fewest seconds of any row."""
        return np.array([seconds.min(initial=math.inf) for seconds in self.seconds.T])

    @functools.cached_property
    def worthwhile(self) -> Mask:
        """Rows that no smaller micro-batch makes needless. Smaller ones need no more memory; all stay where a
        model-stage trains, for what is slower without recomputation may be faster with it."""
        slower = np.zeros(len(self), dtype=bool)
        if not self.trains:
            slower[1:] = np.logical_and.reduce([seconds[1:] >= seconds[:-1] for seconds in self.seconds.T])
        kept: Mask = ~(slower & self.rows.continues)
        return kept

    def options(self, rows: Ints) -> Options:
        """Devices and fewest seconds of some rows."""
        return Options(self.rows.devices[rows], self.seconds[rows])

    def candidates(self, rows: Ints, recompute: Recompute = Recompute.NONE) -> Candidates:
        """The candidates made from some rows (ascending), whether they fit a device or not."""
        columns, pricing = self.rows, self.pricing
        held = footprints(
            self.model_stage, self.spec, layout_table(self.spec, columns.layouts), columns.at[rows],
            dp=columns.dp[rows], micro_batch=columns.micro_batch[rows],
            workload=pricing.workload, recompute=recompute, precision=pricing.precision,
        )  # fmt: skip
        return Candidates(
            self.model_stage,
            tp=columns.tp[rows],
            pp=columns.pp[rows],
            dp=columns.dp[rows],
            grain=columns.grain[rows],
            micro_batch=columns.micro_batch[rows],
            recompute=np.full(len(rows), RECOMPUTES.index(recompute), dtype=np.int64),
            region=columns.region[rows],
            seconds=self.seconds[rows] if recompute is Recompute.NONE else self._recomputing(rows, recompute),
            active=held.active,
            idle=held.idle,
            shared_active=held.shared_active,
            shared_idle=held.shared_idle,
        )

    def _recomputing(self, rows: Ints, recompute: Recompute) -> Floats:
        """[some rows, waves]: their seconds with recomputation."""
        seconds = np.zeros((len(rows), self.pricing.num_waves))
        for family in self.rows.families:
            first, last = np.searchsorted(rows, [family.first, family.last])
            if first < last:
                own = rows[first:last]
                cell, devices = family.cell[own - family.first], self.rows.devices[own]
                seconds[first:last] = self._seconds(family, cell, devices, recompute)
        return seconds

    def _seconds(self, family: Family, cell: Ints, devices: Ints, recompute: Recompute) -> Floats:
        """[cells, waves] of a family; devices: of each cell."""
        pricing, cost = self.pricing, self.pricing.cost
        shape, name = Shape.of(self.spec), pricing.line.regions[family.region].accelerator
        prices = TaskPrices(
            shape, family.layouts, layout_table(self.spec, family.layouts), family.span,
            amounts_of(pricing.workload, self.pairs, shape.window), pricing.precision,
            cost.cluster.accelerator(name), cost.devices_per_node,
        )  # fmt: skip
        lines = cost.lines(name, None)
        seconds = np.zeros((len(cell), pricing.num_waves))
        waves = pricing.workflow.waves
        slowed = self._slowed(devices)
        for task in self.tasks:
            taken = prices.seconds(task.kind, lines, recompute).ravel()[cell]
            if slowed is not None:
                computing = prices.seconds(task.kind, np.where(ON_DEVICE, lines, 0.0), recompute).ravel()[cell]
                taken += slowed * computing
            seconds[:, waves[task.name]] += taken
        return seconds

    def _slowed(self, devices: Ints) -> Floats | None:
        """[cells]: by how much processor workers slow each other down on a node's cores; None on accelerators.

        A model-stage with nothing beside it is slowed by its own workers, others by all that a node has.
        """
        cores, node = self.pricing.cost.cluster.cores_per_node, self.pricing.line.max_node
        if not cores:
            return None
        workers = np.minimum(devices, node) if self._crowded_by_own else np.full(len(devices), node)
        return crowding(workers, cores) - 1.0


class WeightSync:
    """Prices of the weight synchronizations of a problem (`sync_seconds`), between whole tables of candidates."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        line, cost = pricing.line, pricing.cost
        self._link = sync_link(len(line.node_sizes))
        self._lines = np.stack([cost.lines(region.accelerator, None) for region in line.regions[::KINDS_OF_A_TYPE]])

    def matrix(self, source: ModelStage, sources: Shapes | Candidates, targets: Shapes | Candidates) -> Floats:
        """[sources, targets]: seconds from each candidate of a model-stage to each of another's."""
        pricing, spec = self.pricing, self.pricing.specs[source.role]
        numel = largest_numel(spec, pricing.space.layouts(spec, pricing.line))[targets.tp, targets.pp]
        slower = np.maximum(type_of(targets.region), type_of(sources.region)[:, None]) if len(self._lines) > 1 else None
        return sync_seconds(
            spec, pricing.precision, sources, targets, largest_numel=numel, lines=self._lines, link=self._link,
            slower=slower,
        )  # fmt: skip

    def classes(self, sources: Candidates, targets: Candidates) -> tuple[Ints, Ints]:
        """([sources], [targets]): keys; candidates with equal ones have equal prices."""
        return (
            packed((sources.num_devices, 32), (sources.tp, 12), (type_of(sources.region), 6)),
            packed((targets.tp, 12), (targets.pp, 12), (targets.dp, 20), (type_of(targets.region), 6)),
        )
