"""Which copies of each model-stage live while an in-place transition is put together. Pure.

Accounting only: what may be destroyed or read follows from here; what is done about it is decided in `in_place`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from nereus.plan import Layout, ModelStage, Plan
from nereus.shards.overlap import IntArray
from nereus.transition.diff import holding_stages
from nereus.transition.operations import Primitive, Unit
from nereus.transition.price import Buffers, DeviceTable, StageState
from nereus.transition.steps import Step

Pool = list[dict[int, int | None]]
"""For every rank of a layout: the devices that hold it, each with the operation that built it (None: was there)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A whole unit that lives, and the operations that built it."""

    model_stage: ModelStage
    layout: Layout
    unit: Unit
    built_by: tuple[int, ...]
    in_host: bool = False


class Copies:
    """Living buffers by model-stage, layout and rank, and the memory they take."""

    def __init__(
        self, plan: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable, lost: frozenset[int]
    ) -> None:
        self._states = states
        self._table = table
        self._pools: dict[ModelStage, dict[Layout, Pool]] = {}
        self._units: dict[ModelStage, list[tuple[Layout, Unit]]] = {}
        self.staged: dict[ModelStage, Source] = {}
        self.host_free = table.host_bytes.copy()
        self.used = np.zeros(table.size, dtype=np.int64)
        for model_stage, stage_plan in holding_stages(plan).items():
            buffers = Buffers.of(stage_plan)
            self._add(model_stage, buffers.where(~np.isin(buffers.devices, list(lost))), None)
            self._units[model_stage] = [(stage_plan.layout, unit) for unit in stage_plan.units]

    def sizes(self, model_stage: ModelStage, buffers: Buffers) -> IntArray:
        """[n]: bytes of each buffer."""
        sizes: IntArray = self._states[model_stage].buffer_bytes(buffers.layout)[buffers.ranks]
        return sizes

    def _add(self, model_stage: ModelStage, buffers: Buffers, built_by: int | None) -> None:
        pools = self._pools.setdefault(model_stage, {})
        pool = pools.setdefault(buffers.layout, [{} for _ in range(buffers.layout.num_ranks)])
        for device, rank in zip(buffers.devices.tolist(), buffers.ranks.tolist(), strict=True):
            pool[rank][device] = built_by
        self.used[buffers.devices] += self.sizes(model_stage, buffers)

    def apply(self, step: Step, operation_id: int) -> None:
        """Account for an operation that was placed."""
        stage, acquires, releases = step.model_stage, step.acquires, step.releases
        if len(acquires.devices):
            self._add(stage, acquires, operation_id)
            self._units.setdefault(stage, []).extend((acquires.layout, unit) for unit in step.targets)
        if len(releases.devices):
            pool = self._pools[stage][releases.layout]
            for device, rank in zip(releases.devices.tolist(), releases.ranks.tolist(), strict=True):
                del pool[rank][device]
            self.used[releases.devices] -= self.sizes(stage, releases)
        if step.primitive is Primitive.OFFLOAD:
            unit, layout = step.sources[0], step.source_layout
            self.staged[stage] = Source(stage, layout, unit, (operation_id,), in_host=True)
            self.host_free -= self.host_bytes(stage, layout, unit)
        if step.primitive is Primitive.RELOAD:
            staged = self.staged.pop(stage)
            self.host_free += self.host_bytes(stage, staged.layout, staged.unit)

    def host_bytes(self, model_stage: ModelStage, layout: Layout, unit: Unit) -> IntArray:
        """[num_nodes]: host memory that staging a unit takes on each node."""
        result = np.zeros(len(self.host_free), dtype=np.int64)
        np.add.at(result, self._table.node[list(unit)], self._states[model_stage].buffer_bytes(layout))
        return result

    def fits(self, model_stage: ModelStage, buffers: Buffers) -> bool:
        return len(self.blocked(model_stage, buffers)) == 0

    def blocked(self, model_stage: ModelStage, buffers: Buffers) -> IntArray:
        """Devices on which the buffers do not fit now."""
        devices = buffers.devices
        over = self.used[devices] + self.sizes(model_stage, buffers) > self._table.limit_bytes[devices]
        blocked: IntArray = devices[over]
        return blocked

    def living_units(self, model_stage: ModelStage, layout: Layout) -> list[Source]:
        """Whole units of a layout that live; recombined from single buffers where none is whole as it was built."""
        pool = self._pools.get(model_stage, {}).get(layout)
        if pool is None or not all(pool):
            return []
        known = [unit for of, unit in self._units.get(model_stage, ()) if of == layout]
        whole = [unit for unit in dict.fromkeys(known) if all(d in pool[r] for r, d in enumerate(unit))]
        return [
            Source(model_stage, layout, unit, _builders(pool, unit)) for unit in whole or list(zip(*pool, strict=False))
        ]

    def sources(self, model_stage: ModelStage) -> list[Source]:
        """Whole units of every layout of a model-stage; the staged one alone while there is one."""
        if model_stage in self.staged:
            return [self.staged[model_stage]]
        return [unit for layout in self._pools.get(model_stage, ()) for unit in self.living_units(model_stage, layout)]

    def proof_of_life(self, model_stage: ModelStage, without: Buffers | None = None) -> tuple[int, ...] | None:
        """The operations that built one whole copy that is left without some buffers; None where none is left."""
        if model_stage in self.staged:
            return self.staged[model_stage].built_by
        for layout, pool in self._pools.get(model_stage, {}).items():
            gone: set[tuple[int, int]] = set()
            if without is not None and without.layout == layout:
                gone = set(zip(without.devices.tolist(), without.ranks.tolist(), strict=True))
            left = [next((d for d in held if (d, rank) not in gone), None) for rank, held in enumerate(pool)]
            unit = tuple(device for device in left if device is not None)
            if len(unit) == layout.num_ranks:
                return _builders(pool, unit)
        return None


def _builders(pool: Pool, unit: Unit) -> tuple[int, ...]:
    found = (pool[rank][device] for rank, device in enumerate(unit))
    return tuple(dict.fromkeys(operation for operation in found if operation is not None))
