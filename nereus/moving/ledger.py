"""Which buffers live on which device while a transition runs, as the driver knows it. Values and bookkeeping only."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from nereus.errors import TransitionAborted
from nereus.moving.commands import BufferKey
from nereus.plan import Layout, ModelStage, Plan, Stage, StagePlan
from nereus.shards.moves import Holding
from nereus.transition.operations import Operation, Primitive
from nereus.transition.remains import Remains

Keys = dict[int, tuple[BufferKey, ...]]
"""Buffers by device."""


class Copy(NamedTuple):
    """A whole copy of a model-stage: every rank of a layout, on devices or in host memory."""

    layout: Layout
    in_host: bool


def built_by(operation: Operation) -> dict[int, BufferKey]:
    """The buffers that an operation makes, by device."""
    if operation.primitive is Primitive.OFFLOAD:
        return _in_host(operation)
    ranks = operation.target_ranks()
    return {device: BufferKey(operation.model_stage, operation.target_layout, ranks[device]) for device in ranks}


def freed_by(operation: Operation) -> dict[int, BufferKey]:
    """The buffers that go when an operation ends, by device; a Reload uses up the copy in host memory."""
    if operation.primitive is Primitive.RELOAD:
        return _in_host(operation)
    ranks, layout = operation.source_ranks(), operation.source_layout
    return {device: BufferKey(operation.source_stage, layout, ranks[device]) for device in operation.releases}


def _in_host(operation: Operation) -> dict[int, BufferKey]:
    stage, layout = operation.source_stage, operation.source_layout
    return {device: BufferKey(stage, layout, rank, in_host=True) for device, rank in operation.source_ranks().items()}


def own_buffers(plan: Plan) -> Iterator[tuple[int, BufferKey]]:
    """(device, buffer) of everything that the model-stages of a plan hold themselves."""
    for model_stage, stage_plan in plan.stages:
        if plan.holder(model_stage) == model_stage:
            for device, rank in Holding.of(stage_plan).ranks:
                yield device, BufferKey(model_stage, stage_plan.layout, rank)


class Ledger:
    """Buffers by model-stage and device. A buffer enters when it is whole and leaves when its release is ordered."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._live: dict[ModelStage, dict[int, set[BufferKey]]] = defaultdict(lambda: defaultdict(set))
        self.enter(own_buffers(plan))

    def enter(self, buffers: Iterable[tuple[int, BufferKey]]) -> None:
        """Enter buffers that are whole."""
        for device, key in buffers:
            self._live[key.model_stage][device].add(key)

    def strike(self, buffers: Iterable[tuple[int, BufferKey]]) -> Keys:
        """Strike out those of the buffers that live; returns them by device."""
        found: dict[int, list[BufferKey]] = defaultdict(list)
        for device, key in buffers:
            if key in self._live[key.model_stage][device]:
                self._live[key.model_stage][device].discard(key)
                found[device].append(key)
        return {device: tuple(keys) for device, keys in found.items()}

    def lives(self, device: int, key: BufferKey) -> bool:
        return key in self._live[key.model_stage][device]

    def buffers(self, stage: ModelStage) -> Mapping[int, frozenset[BufferKey]]:
        """Living buffers of a model-stage by device."""
        return {device: frozenset(keys) for device, keys in self._live[stage].items() if keys}

    @property
    def stages(self) -> tuple[ModelStage, ...]:
        """Model-stages of which anything ever lived."""
        return tuple(self._live)

    def trust(self, census: Mapping[int, Iterable[BufferKey]]) -> None:
        """Strike out what no living worker says it holds whole. census: by device; one that is not in it is lost."""
        said = {device: frozenset(keys) for device, keys in census.items()}
        for by_device in self._live.values():
            for device in by_device:
                by_device[device] &= said.get(device, frozenset())

    def acquired(self, operation: Operation) -> None:
        """Enter what an operation built."""
        self.enter(built_by(operation).items())

    def released(self, operation: Operation) -> Keys:
        """Strike out what an operation frees; returns it by device.

        Raises TransitionAborted, and strikes nothing out, where no whole copy of the model-stage would live.
        """
        stage, found = operation.source_stage, self.strike(freed_by(operation).items())
        training = ModelStage(stage.role, Stage.TRAINING)  # its parameters are those of every stage of the role
        if not self.copies(stage) and not self.copies(training):
            self.enter((device, key) for device, keys in found.items() for key in keys)
            raise TransitionAborted(operation.name, f"it would destroy the last copy of {stage}")
        return found

    def copies(self, stage: ModelStage) -> tuple[Copy, ...]:
        """The whole copies of a model-stage."""
        ranks: dict[Copy, set[int]] = defaultdict(set)
        for keys in self._live[stage].values():
            for key in keys:
                ranks[Copy(key.layout, key.in_host)].add(key.rank)
        return tuple(copy for copy, held in ranks.items() if len(held) == copy.layout.num_ranks)

    def holding(self, stage: ModelStage, copy: Copy) -> Holding | None:
        """Living buffers that make a copy whole, one a device; None where no choice of them does.

        All of them where no device has two. A device that builds one rank beside another, as in a swap of ranks, has
        two; then each rank is taken from one device.
        """
        held: dict[int, list[int]] = {}
        for device, keys in sorted(self._live[stage].items()):
            ranks = sorted(key.rank for key in keys if Copy(key.layout, key.in_host) == copy)
            if ranks:
                held[device] = ranks
        if all(len(ranks) == 1 for ranks in held.values()):
            chosen = {device: ranks[0] for device, ranks in held.items()}
        else:
            chosen = _one_rank_each(held)
        whole = len(set(chosen.values())) == copy.layout.num_ranks
        return Holding.by_device(copy.layout, chosen) if whole else None

    def intact(self, stage: ModelStage) -> tuple[tuple[int, ...], ...]:
        """Units of the old plan all of whose buffers live."""
        stage_plan = self.plan[stage]
        live, layout = self._live[stage], stage_plan.layout
        return tuple(
            unit
            for unit in stage_plan.units
            if all(BufferKey(stage, layout, rank) in live[device] for rank, device in enumerate(unit))
        )

    def remains(self, *, lost: Iterable[int], problems: Iterable[str]) -> Remains:
        """What is left of the old plan. lost, problems: as `Remains` has them."""
        holding = [stage for stage in self.plan.model_stages if self.plan.holder(stage) == stage]
        whole = tuple((stage, units) for stage in holding if (units := self.whole_units(stage)) is not None)
        return Remains(self.plan, whole, frozenset(lost), tuple(problems))

    def whole_units(self, stage: ModelStage) -> StagePlan | None:
        """The units that living buffers on devices make: of the old plan's layout where that has one, intact first.

        Buffers of broken units are recombined. None where no layout has every rank.
        """
        old = self.plan[stage].layout
        for layout in sorted({copy.layout for copy in self.copies(stage) if not copy.in_host}, key=lambda x: x != old):
            units = list(self.intact(stage)) if layout == old else []
            used = {device for unit in units for device in unit}
            free = {device: keys for device, keys in sorted(self._live[stage].items()) if device not in used}
            while unit := _unit_of(stage, layout, free):
                units.append(unit)
                free = {device: keys for device, keys in free.items() if device not in unit}
            if units:
                return StagePlan(layout, tuple(units))
        return None


def _unit_of(stage: ModelStage, layout: Layout, live: Mapping[int, set[BufferKey]]) -> tuple[int, ...] | None:
    """A device for every rank, no device twice; None where there is no choice of them."""
    held = {
        device: sorted(key.rank for key in keys if key == BufferKey(stage, layout, key.rank))
        for device, keys in live.items()
    }
    by_rank = {rank: device for device, rank in _one_rank_each(held).items()}
    ranks = range(layout.num_ranks)
    return tuple(by_rank[rank] for rank in ranks) if by_rank.keys() >= set(ranks) else None


def _one_rank_each(held: Mapping[int, list[int]]) -> dict[int, int]:
    """{device: rank}: as many different ranks as devices can show at once, one each (augmenting paths)."""
    shown_by: dict[int, int] = {}

    def place(device: int, tried: set[int]) -> bool:
        for rank in held[device]:
            if rank not in tried:
                tried.add(rank)
                if rank not in shown_by or place(shown_by[rank], tried):
                    shown_by[rank] = device
                    return True
        return False

    for device in held:
        place(device, set())
    return {device: rank for rank, device in shown_by.items()}
