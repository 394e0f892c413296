"""Who may share devices with whom, and what memory leaves room for. Questions only: nothing here changes a choice.

overlapping blocks     allowed where no two of their model-stages must be apart (`must_part`)
one block for two      a model-stage that uses the parameters of its role's trainer in place (`joined`)
room                   idle bytes of all on a device, and the largest peak, within its capacity (`fits_beside`)
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage, Stage
from nereus.planner.placement import Placement
from nereus.planner.prices.syncs import Pair
from nereus.planner.search.choices import Part
from nereus.planner.space.arrays import Ints, Mask
from nereus.planner.space.candidates import Candidates
from nereus.planner.space.line import Block, Line
from nereus.planner.space.regions import stricter


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """The rules of one search.

    overlapped: generation has devices of its own. crosser: the model-stage that also has a task in a wave of another
    stage.
    """

    line: Line
    tables: Mapping[ModelStage, Candidates]
    syncs: tuple[Pair, ...]
    placement: Placement
    overlapped: bool
    crosser: ModelStage | None

    @property
    def in_turn(self) -> bool:
        return self.placement is Placement.COLOCATED

    def must_part(self, x: ModelStage, y: ModelStage, off_crosser: Sequence[ModelStage] = ()) -> bool:
        """Whether two model-stages may not share a device; `off_crosser`: those to keep off the crosser's devices."""
        if x.stage == y.stage or (self.placement is Placement.DISJOINT and x.role != y.role):
            return True
        if self.overlapped and Stage.GENERATION in (x.stage, y.stage):
            return True
        return (x == self.crosser and y in off_crosser) or (y == self.crosser and x in off_crosser)

    def conflicts(self, part: Part, off_crosser: Sequence[ModelStage] = ()) -> tuple[int, ...]:
        """For each block of a choice the mask of those it must not overlap."""
        masks = [0] * len(part.blocks)
        if self.in_turn:
            return tuple(masks)
        for a in range(len(part.blocks)):
            for b in range(a):
                if any(self.must_part(x, y, off_crosser) for x in part.members[a] for y in part.members[b]):
                    masks[a] |= 1 << b
                    masks[b] |= 1 << a
        return tuple(masks)

    def block(self, index: int, model_stage: ModelStage, row: int) -> Block:
        """A block of its own for a candidate."""
        table = self.tables[model_stage]
        grain, idle = int(table.grain[row]), int(table.idle[row])
        groups = int(table.num_devices[row]) // grain
        return Block(index, grain, groups, int(table.region[row]), idle, int(table.active[row]) - idle)

    def joined(self, block: Block, model_stage: ModelStage, row: int) -> Block:
        """The block of a training model-stage and one that uses its parameters in place: the stricter region holds."""
        table = self.tables[model_stage]
        idle = block.idle + int(table.shared_idle[row])
        peak = max(block.peak, int(table.shared_active[row] - table.shared_idle[row]))
        region = stricter(block.region, int(table.region[row]))
        return dataclasses.replace(block, idle=idle, peak=peak, region=region)

    def leanest(self, m: ModelStage) -> tuple[Ints, Ints]:
        """([rows of `m`] each) idle and peak bytes at least: fewer where it may share the parameters of its source."""
        table = self.tables[m]
        idle, peak = table.idle, table.active - table.idle
        if any(m == target for _, target in self.syncs):
            idle, peak = np.minimum(idle, table.shared_idle), np.minimum(peak, table.shared_active - table.shared_idle)
        return idle, peak

    def fits_beside(self, part: Part, m: ModelStage, others: int) -> Mask:
        """[rows of `m`]: whether memory suffices on devices that it must share; `others`: idle bytes sure to come.

        Two blocks share a device for certain where together they have more devices than the line: 5 and 4 on 8.
        """
        table, room = self.tables[m], self.line.max_capacity
        idle, peak = self.leanest(m)
        if self.in_turn:
            held = sum(block.idle for block in part.blocks)
            highest = max(block.peak for block in part.blocks)
            return np.asarray(idle + held + others + np.maximum(peak, highest) <= room)
        fits = table.num_devices + self._devices_of_others(part, m) <= self.line.num_devices
        for block, members in zip(part.blocks, part.members, strict=True):
            forced = table.num_devices + block.grain * block.groups > self.line.num_devices
            if any(self.must_part(member, m) for member in members):
                fits &= ~forced
            else:
                fits &= ~forced | (idle + block.idle + np.maximum(peak, block.peak) <= room)
        return fits

    def _devices_of_others(self, part: Part, m: ModelStage) -> int:
        """Devices that roles other than the one of `m` keep to themselves, at least; 0 where roles may share."""
        if self.placement is not Placement.DISJOINT:
            return 0
        held: dict[str, int] = {}
        for other, table in self.tables.items():
            least = int(table.num_devices[part.rows[other]]) if other in part.rows else int(table.num_devices.min())
            held[other.role] = max(held.get(other.role, 0), least)
        return sum(devices for role, devices in held.items() if role != m.role)
