"""The price of one model-stage under one layout and setting: a row of the columns that the search uses.

    workload, spec, layout -> operations counted per task (`task_prices`) -> seconds (`calibration`)

It knows neither devices nor placement: a `Span` says which links the axes cross. What overlaps with what is the
search's business.
"""

import dataclasses
import functools

import numpy as np

from nereus.cluster import Accelerator, Cluster
from nereus.engine_facts import Op, Precision
from nereus.model import ModelSpec
from nereus.plan import Layout, ModelStage, Recompute
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.footprints import layout_table
from nereus.planner.prices.operations import COLUMN, COMPUTE, KEYS, MEMORY, Bill, Counts, Shape, key_name
from nereus.planner.prices.passes import Span
from nereus.planner.prices.syncs import Shapes
from nereus.planner.prices.task_prices import TaskPrices
from nereus.planner.prices.weight_sync import sync_link, sync_seconds
from nereus.planner.space.arrays import Floats, Ints
from nereus.planner.space.settings import Amounts, Pairs
from nereus.planner.workload import Workload
from nereus.workflow import Kind, Task

BUBBLE = "bubble"
"""Name under which `StageCost.operations` lists the time a rank waits for its pipeline to fill and drain."""

ON_DEVICE = np.array([op in COMPUTE or op in MEMORY or op is Op.LAUNCH for op, _ in KEYS])
"""Classes that slow down where workers share processor cores."""


CONTENTION = 0.1
"""Share by which processor workers on all cores of a node slow each other down: they have cores of their own, but one
memory, one last cache and one budget of power. Between one worker and all it grows with the busy cores. Set on two
cores, where 0.1 predicts both one worker and two (LOG.md, 2026-11-30)."""


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
        own = tuple(task for task in tasks if task.model_stage == model_stage)
        bills = _bills(
            tuple(dict.fromkeys(task.kind for task in own)), spec, layout, dp, workload, max(1, micro_batch), recompute,
            precision, self.cluster.accelerator(accelerator), span, self.devices_per_node,
        )  # fmt: skip
        lines = self.lines(accelerator, active_workers_on_node)
        return StageCost({task.name: _cost(*bills[task.kind], lines) for task in own}, lines)

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

        accelerator: the slower type of the two sides (default: the cluster's first).
        """
        (layout, _), name = target, accelerator or self.cluster.accelerators[0].name
        seconds = sync_seconds(
            spec, precision, _one_shape(*source), _one_shape(*target),
            largest_numel=layout_table(spec, ((layout.tp, layout.pp),)).largest_numel,
            lines=self.lines(name, None)[None], link=sync_link(1 if same_node else 2),
        )  # fmt: skip
        return float(seconds[0, 0])

    def lines(self, accelerator: str, active_workers: int | None) -> Counts:
        """Seconds per work and per call; computing takes longer where processor workers share a node (`crowding`)."""
        lines, cores = self.calibration.lines(accelerator), self.cluster.cores_per_node
        if not cores or not active_workers:
            return lines
        return np.where(ON_DEVICE, lines * crowding(np.array(active_workers), cores), lines)


def _cost(work: Bill, bubble: Bill, lines: Counts) -> TaskCost:
    return TaskCost(work, bubble, float(((work.counts + bubble.counts) * lines).sum()))


@functools.lru_cache(maxsize=1024)
def _bills(
    kinds: tuple[Kind, ...],
    spec: ModelSpec,
    layout: Layout,
    dp: int,
    workload: Workload,
    micro_batch: int,
    recompute: Recompute,
    precision: Precision,
    accelerator: Accelerator,
    span: Span,
    devices_per_node: int,
) -> dict[Kind, tuple[Bill, Bill]]:
    """(operations of the slowest rank, operations it waits for) of each kind of task, as `TaskPrices.bills`.

    No calibration is in them: they stay while lengths do, whatever is learned of the seconds of an operation.
    Callers share the bills, and add them to their own.
    """
    shape, layouts = Shape.of(spec), ((layout.tp, layout.pp),)
    one = Pairs(np.array([dp], dtype=np.int64), np.array([micro_batch], dtype=np.int64))
    prices = TaskPrices(
        shape, layouts, layout_table(spec, layouts), span, Amounts(workload, one, shape.window), precision,
        accelerator, devices_per_node,
    )  # fmt: skip
    return {kind: prices.bills(kind, recompute) for kind in kinds}


def _one_shape(layout: Layout, dp: int) -> Shapes:
    """A table of one candidate."""
    return Shapes(*(np.array([value], dtype=np.int64) for value in (layout.tp, layout.pp, dp, 0)))


def crowding(workers: Ints, cores: int) -> Floats:
    """[...]: how many times longer processor workers compute where so many share a node of so many cores."""
    busy = (np.minimum(workers, cores) - 1) / max(1, cores - 1)
    times: Floats = np.maximum(1.0, workers / cores) * (1 + CONTENTION * busy)
    return times
