"""Which buffers live on which device while a transition runs, as the driver knows it. Values and bookkeeping only."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from nereus.errors import TransitionAborted
from nereus.plan import Layout, ModelStage, Plan, Stage, StagePlan
from nereus.transition.orders import BufferKey
from nereus.transition.primitives import Operation
from nereus.transition.reshard import Holding


@dataclasses.dataclass(frozen=True, slots=True)
class Refill:
    """Buffers of the old plan to be built again. `drops`: staged buffers that must go first, by device."""

    model_stage: ModelStage
    source: Holding
    target: Holding
    drops: dict[int, tuple[BufferKey, ...]]


class Ledger:
    """Buffers by model-stage and device. A buffer enters when it is whole and leaves when its release is ordered."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._live: dict[ModelStage, dict[int, set[BufferKey]]] = defaultdict(lambda: defaultdict(set))
        for model_stage, device, key in _own_buffers(plan):
            self._live[model_stage][device].add(key)

    def acquired(self, operation: Operation) -> None:
        """Enter what an operation built."""
        for device, rank in operation.target_ranks().items():
            key = BufferKey(operation.model_stage, operation.target_layout, rank)
            self._live[operation.model_stage][device].add(key)

    def released(self, operation: Operation) -> dict[int, BufferKey]:
        """Strike out what an operation frees; returns it by device.

        Raises TransitionAborted, and strikes nothing out, where no whole copy of the model-stage would live.
        """
        stage, ranks = operation.source_stage, operation.source_ranks()
        found = {d: BufferKey(stage, operation.source_layout, ranks[d]) for d in operation.releases}
        found = {device: key for device, key in found.items() if key in self._live[stage][device]}
        for device, key in found.items():
            self._live[stage][device].discard(key)
        if not self._copy_lives(stage):
            for device, key in found.items():
                self._live[stage][device].add(key)
            raise TransitionAborted(operation.name, f"it would destroy the last copy of {stage}")
        return found

    def _copy_lives(self, stage: ModelStage) -> bool:
        """Whether every rank of some layout lives, of the model-stage or (for parameters) of the role's training."""
        training = ModelStage(stage.role, Stage.TRAINING)
        return any(self.whole_layouts(source) for source in {stage, training})

    def whole_layouts(self, stage: ModelStage) -> tuple[Layout, ...]:
        """Layouts of which every rank lives somewhere."""
        ranks: dict[Layout, set[int]] = defaultdict(set)
        for keys in self._live[stage].values():
            for key in keys:
                ranks[key.layout].add(key.rank)
        return tuple(layout for layout, held in ranks.items() if len(held) == layout.num_ranks)

    def holding(self, stage: ModelStage, layout: Layout) -> Holding:
        """Every living buffer of a layout."""
        return Holding.by_device(
            layout, {d: key.rank for d, keys in self._live[stage].items() for key in keys if key.layout == layout}
        )

    def refills(self) -> Iterator[Refill]:
        """What brings the old plan back: each model-stage's destroyed buffers from a copy that lives.

        Where a whole copy of the old layout lives the new buffers go first, so the refill needs no more memory than
        the old plan did; otherwise it reads from them.
        """
        for stage, stage_plan in self._plan.stages:
            if self._plan.holder(stage) != stage:
                continue
            wanted = dict(Holding.of(stage_plan).ranks)
            live, old = self._live[stage], stage_plan.layout
            lost = {d: rank for d, rank in wanted.items() if BufferKey(stage, old, rank) not in live[d]}
            whole = self.whole_layouts(stage)
            if not lost or not whole:
                continue
            layout = old
            drops: dict[int, tuple[BufferKey, ...]] = {}
            if layout in whole:
                drops = self._strike_all_but(stage, stage_plan)
            else:
                layout = whole[0]
            yield Refill(stage, self.holding(stage, layout), Holding.by_device(old, lost), drops)

    def refilled(self, refill: Refill) -> None:
        """Enter what a refill built."""
        for device, rank in refill.target.ranks:
            self._live[refill.model_stage][device].add(BufferKey(refill.model_stage, refill.target.layout, rank))

    def intact(self, stage: ModelStage) -> tuple[tuple[int, ...], ...]:
        """Units of the old plan all of whose buffers live."""
        stage_plan = self._plan[stage]
        live, layout = self._live[stage], stage_plan.layout
        return tuple(
            unit
            for unit in stage_plan.units
            if all(BufferKey(stage, layout, rank) in live[device] for rank, device in enumerate(unit))
        )

    def _strike_all_but(self, stage: ModelStage, stage_plan: StagePlan) -> dict[int, tuple[BufferKey, ...]]:
        """Strike out the staged buffers of a model-stage; returns them by device."""
        wanted = dict(Holding.of(stage_plan).ranks)
        drops: dict[int, tuple[BufferKey, ...]] = {}
        for device, keys in self._live[stage].items():
            old = BufferKey(stage, stage_plan.layout, wanted[device]) if device in wanted else None
            staged = tuple(key for key in keys if key != old)
            if staged:
                drops[device] = staged
                keys.difference_update(staged)
        return drops


def _own_buffers(plan: Plan) -> Iterator[tuple[ModelStage, int, BufferKey]]:
    """The buffers that the model-stages of a plan hold themselves."""
    for model_stage, stage_plan in plan.stages:
        if plan.holder(model_stage) == model_stage:
            for device, rank in Holding.of(stage_plan).ranks:
                yield model_stage, device, BufferKey(model_stage, stage_plan.layout, rank)
