"""A transition that frees old units before all new ones are whole, where both do not fit together. Pure.

Operations are per unit here, and placed by playing the transition:

    place every new unit that fits
      nothing fits: free a surplus old unit on a device that blocks one       (another copy lives)
        none can be freed: stage the smallest blocking unit in host memory    (that copy lives)
          does not fit there: Infeasible

What is collected could run in that order; `reorder` looks for a shorter one. Edges point backwards only, so nobody
waits in a circle. A resource edge joins a Destroy to the
acquisition that would not fit without it; every other edge says which operation made the state that another reads or
relies on.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage, Plan, Stage
from nereus.shards.overlap import IntArray
from nereus.transition.copies import Copies, Source
from nereus.transition.diff import Change
from nereus.transition.in_place_order import Piece, shortest_order
from nereus.transition.operations import Infeasible, Mode, Primitive, TransitionDag, Unit
from nereus.transition.price import Buffers, DeviceTable, Rates, StageState, readable_bytes
from nereus.transition.schedule import DagBuilder
from nereus.transition.steps import Step, destroy_step, offload_step, unit_step


@dataclasses.dataclass(eq=False, slots=True)
class _Work:
    """What is left to do for one model-stage: target units to build, and old buffers to free, unit by unit."""

    change: Change
    to_build: list[tuple[Unit, Buffers]]
    to_free: list[Buffers]

    @classmethod
    def of(cls, change: Change) -> "_Work":
        return cls(change, _new_by_unit(change), _old_by_unit(change))


def _new_by_unit(change: Change) -> list[tuple[Unit, Buffers]]:
    if change.target_plan is None:
        return []
    size = change.target.layout.num_ranks
    result: list[tuple[Unit, Buffers]] = []
    for index, unit in enumerate(change.target_plan.units):
        chosen = np.zeros(len(change.acquired), dtype=np.bool_)
        chosen[index * size : (index + 1) * size] = change.acquired[index * size : (index + 1) * size]
        if chosen.any():
            result.append((unit, change.target.where(chosen)))
    return result


def _old_by_unit(change: Change) -> list[Buffers]:
    if change.current_plan is None:
        return []
    index_of = {device: i for i, unit in enumerate(change.current_plan.units) for device in unit}
    old = change.old_buffers
    owner = np.array([index_of[device] for device in old.devices.tolist()], dtype=np.int64)
    return [old.where(owner == index) for index in np.unique(owner).tolist()]


def in_place_dag(
    current: Plan,
    target: Plan,
    changes: Sequence[Change],
    *,
    states: Mapping[ModelStage, StageState],
    table: DeviceTable,
    rates: Rates,
    lost: frozenset[int] = frozenset(),
) -> TransitionDag | Infeasible:
    """The DAG of an in-place transition: without host memory if possible, late release tried before early release."""
    refusal = Infeasible("nothing to do")
    for stages_in_host in (False, True):
        for release_early in (False, True):
            copies = Copies(current, states=states, table=table, lost=lost)
            used = copies.used.copy()
            builder = _Builder(copies, [_Work.of(change) for change in changes], table, rates)
            outcome = builder.build(release_early=release_early, stages_in_host=stages_in_host)
            if outcome is None:
                return _place(DagBuilder(current, target, Mode.IN_PLACE), builder.pieces, used, table)
            refusal = outcome
    return refusal


def _place(dag_builder: DagBuilder, pieces: Sequence[Piece], used: IntArray, table: DeviceTable) -> TransitionDag:
    """Order the pieces and give them their ids and edges. `used`: bytes held before the first."""
    staged = sum(piece.step.primitive is Primitive.OFFLOAD for piece in pieces)
    order: Sequence[int] = range(len(pieces))
    if staged < 2:  # what is in host memory at once was counted for the given order
        order = shortest_order(pieces, used=used, limit=table.limit_bytes)
    unreleased, freed_on = used.copy(), _Freed()
    ids: dict[int, int] = {}
    for index in order:
        step, new = pieces[index].step, pieces[index].step.acquires
        lacking = unreleased[new.devices] + pieces[index].acquired_bytes - table.limit_bytes[new.devices]
        needed = freed_on.that_free(new.devices, lacking)
        ids[index] = dag_builder.add(step, local=tuple(ids[i] for i in pieces[index].after), resource=needed)
        unreleased[new.devices] += pieces[index].acquired_bytes
        freed_on.add(ids[index], step.releases.devices, pieces[index].freed_bytes)
    return dag_builder.dag()


class _Freed:
    """What the Destroys placed so far freed on each device, earliest first."""

    def __init__(self) -> None:
        self._on: dict[int, list[tuple[int, int]]] = {}

    def add(self, destroy: int, devices: IntArray, freed_bytes: IntArray) -> None:
        for device, freed in zip(devices.tolist(), freed_bytes.tolist(), strict=True):
            self._on.setdefault(device, []).append((destroy, freed))

    def that_free(self, devices: IntArray, lacking_bytes: IntArray) -> tuple[int, ...]:
        """The Destroys without which the devices would lack that much, the earliest that suffice on each."""
        needed: dict[int, None] = {}
        for device, lacking in zip(devices.tolist(), lacking_bytes.tolist(), strict=True):
            for destroy, freed in self._on.get(device, ()):
                if lacking <= 0:
                    break
                needed[destroy] = None
                lacking -= freed
        return tuple(needed)


@dataclasses.dataclass(eq=False, slots=True)
class _Builder:
    """Plays one in-place transition and collects what runs, in a feasible order."""

    copies: Copies
    work: list[_Work]
    table: DeviceTable
    rates: Rates
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    read_by: dict[tuple[ModelStage, int], list[int]] = dataclasses.field(default_factory=dict)
    sent_by: dict[Unit, int] = dataclasses.field(default_factory=dict)

    def build(self, *, release_early: bool, stages_in_host: bool) -> Infeasible | None:
        """Place everything; None when done, or what could not be placed."""
        while any(work.to_build for work in self.work):
            if release_early:
                while self._free_surplus(None):
                    pass
            if self._place_fitting():
                continue
            blocked = [
                (work, new, self.copies.blocked(work.change.model_stage, new))
                for work in self.work
                for _, new in work.to_build
            ]
            if any(self._free_surplus(devices) for _, _, devices in blocked):
                continue
            if stages_in_host and self._stage(np.concatenate([devices for _, _, devices in blocked])):
                continue
            return self._refuse(*blocked[0])
        while self._free_surplus(None):
            pass
        left = next((work for work in self.work if work.to_free), None)
        return Infeasible(f"the last copy of {left.change.model_stage} cannot be freed") if left else None

    def _place_fitting(self) -> bool:
        """Place every target unit that fits and has a source; whether there was one."""
        placed = False
        for work in self.work:
            waiting: list[tuple[Unit, Buffers]] = []
            for unit, new in work.to_build:
                source = self._source(work.change, unit) if self.copies.fits(work.change.model_stage, new) else None
                if source is None:
                    waiting.append((unit, new))
                    continue
                self._acquire(work.change, unit, new, source)
                placed = True
            work.to_build = waiting
        return placed

    def _source(self, change: Change, unit: Unit) -> Source | None:
        """The living unit to build from: most devices in common first, then least used, then on the same node."""
        found = self.copies.sources(change.model_stage)
        if not found and change.source_stage not in self.copies.staged:
            found = self.copies.sources(change.source_stage)
        at, devices = self.table.node, set(unit)
        return min(
            found,
            key=lambda source: (
                -len(devices.intersection(source.unit)),
                self.sent_by.get(source.unit, 0),
                int(at[source.unit[0]] != at[unit[0]]),
            ),
            default=None,
        )

    def _acquire(self, change: Change, unit: Unit, new: Buffers, source: Source) -> None:
        step = unit_step(
            change, unit, new, source_stage=source.model_stage, source_layout=source.layout, source=source.unit,
            in_host=source.in_host, table=self.table, rates=self.rates,
        )  # fmt: skip
        index = self._add(step, after=source.built_by)
        self.sent_by[source.unit] = self.sent_by.get(source.unit, 0) + 1
        for device in source.unit:
            self.read_by.setdefault((source.model_stage, device), []).append(index)

    def _add(self, step: Step, *, after: tuple[int, ...]) -> int:
        """Collect a step that follows others; returns its index."""
        index, stage = len(self.pieces), step.model_stage
        acquired, freed = self.copies.sizes(stage, step.acquires), self.copies.sizes(stage, step.releases)
        self.pieces.append(Piece(step, tuple(dict.fromkeys(after)), acquired, freed))
        self.copies.apply(step, index)
        return index

    def _free_surplus(self, devices: IntArray | None) -> bool:
        """Free one old unit, on one of the devices if given, where another copy lives; whether there was one."""
        wanted = None if devices is None else set(devices.tolist())
        for work in self.work:
            for old in work.to_free:
                if wanted is not None and wanted.isdisjoint(old.devices.tolist()):
                    continue
                proof = self._proof(work, old)
                if proof is not None:
                    self._free(work, old, proof)
                    return True
        return False

    def _proof(self, work: _Work, old: Buffers) -> tuple[int, ...] | None:
        """The operations that built the copy that lives on without these buffers, training's where those are used."""
        change = work.change
        proof = self.copies.proof_of_life(change.model_stage, without=old)
        if proof is None and change.target_plan is None:
            return self.copies.proof_of_life(ModelStage(change.model_stage.role, Stage.TRAINING))
        return proof

    def _free(self, work: _Work, old: Buffers, proof: tuple[int, ...]) -> None:
        stage, devices = work.change.model_stage, old.devices.tolist()
        step = destroy_step(work.change, old, rates=self.rates)
        readers = [reader for device in devices for reader in self.read_by.get((stage, device), ())]
        self._add(step, after=(*proof, *readers))
        work.to_free = [other for other in work.to_free if other is not old]

    def _stage(self, devices: IntArray) -> bool:
        """Copy the smallest sole unit that blocks one of the devices to host memory; whether one fits there."""
        wanted, best = set(devices.tolist()), None
        for work in self.work:
            stage = work.change.model_stage
            if stage in self.copies.staged or not work.to_build:
                continue
            if all(wanted.isdisjoint(old.devices.tolist()) for old in work.to_free):
                continue
            for source in self.copies.sources(stage):
                asked = self.copies.host_bytes(stage, source.layout, source.unit)
                if (asked <= self.copies.host_free).all() and (best is None or asked.sum() < best[0]):
                    best = int(asked.sum()), work.change, source
        if best is None:
            return False
        _, change, source = best
        step = offload_step(change, source.layout, source.unit, rates=self.rates)
        index = self._add(step, after=source.built_by)
        for device in source.unit:
            self.read_by.setdefault((change.model_stage, device), []).append(index)
        return True

    def _refuse(self, work: _Work, new: Buffers, blocked: IntArray) -> Infeasible:
        stage = work.change.model_stage
        if not len(blocked):
            return Infeasible(f"no copy of {stage} is left to build it from")
        device = int(blocked[0])
        need = int(self.copies.sizes(stage, new)[new.devices == device][0])
        free = int(self.table.limit_bytes[device] - self.copies.used[device])
        return Infeasible(
            f"{stage} needs {readable_bytes(need)} on device {device}, where {readable_bytes(free)} are free; "
            f"what holds the rest has no other living copy, and host memory has no room to stage it"
        )
