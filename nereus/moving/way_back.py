"""The way back from an aborted in-place transition: what rebuilds the old plan's buffers, and in what order. Pure.

    drop what is no longer needed      (new buffers of a model-stage that has a whole copy in the old plan or the host)
      refill a model-stage whose lost buffers fit now
        none fits: copy the smallest whole one to host memory, so that its new buffers can be dropped
          none fits there: refill all the same; the worker says whether it had room

The old plan fitted, so once all else is dropped the lost buffers fit as well.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from nereus.moving.commands import BufferKey, StageKinds
from nereus.moving.ledger import Copy, Keys, Ledger, own_buffers
from nereus.plan import ModelStage
from nereus.shards.boxes import flat_numel
from nereus.shards.moves import Holding
from nereus.transition.price import DeviceTable

Buffers = list[tuple[int, BufferKey]]


@dataclasses.dataclass(frozen=True, slots=True)
class Refill:
    """One move on the way back. drops: buffers that go before it, by device.

    source_in_host: it reads a copy in host memory; target_in_host: it makes one.
    """

    model_stage: ModelStage
    source: Holding
    target: Holding
    drops: Keys
    source_in_host: bool = False
    target_in_host: bool = False

    @property
    def built(self) -> Buffers:
        """What it builds, with the devices."""
        layout, in_host = self.target.layout, self.target_in_host
        return [(device, BufferKey(self.model_stage, layout, rank, in_host)) for device, rank in self.target.ranks]


class Recovery:
    """What is left to do until the old plan of a ledger is whole, but for what lay on lost devices.

    table: what fits; everything, where it is None.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        states: Mapping[ModelStage, StageKinds],
        table: DeviceTable | None = None,
        lost: Collection[int] = (),
    ) -> None:
        self._ledger, self._states, self._table = ledger, states, table
        self._old: dict[ModelStage, Buffers] = {}
        for device, key in own_buffers(ledger.plan):
            if device in lost:
                continue
            self._old.setdefault(key.model_stage, []).append((device, key))

    def refills(self) -> Iterator[Refill]:
        """The moves, each to be carried out, and what it built entered in the ledger, before the next is asked for.

        One that fails is left out: the ledger keeps saying what is not whole. Of a model-stage without a whole copy
        nothing can be refilled.
        """
        pending = [stage for stage in self._old if self._lost(stage) and self._source(stage) is not None]
        staged: set[ModelStage] = set()
        while pending:
            drops = self._strike_surplus()
            fitting = next((stage for stage in pending if self._fits(self._lost(stage))), None)
            if fitting is None:
                refill = self._offload([stage for stage in pending if stage not in staged], drops)
                if refill is not None:
                    staged.add(refill.model_stage)
                    yield refill
                    continue
            stage = fitting or pending[0]
            pending.remove(stage)
            yield self._refill(stage, drops)

    def _lost(self, stage: ModelStage) -> Buffers:
        return [(device, key) for device, key in self._old[stage] if not self._ledger.lives(device, key)]

    def _source(self, stage: ModelStage) -> tuple[Holding, Copy] | None:
        """What to read: of the old layout if possible, from devices if possible."""
        layout = self._ledger.plan[stage].layout
        for copy in sorted(self._ledger.copies(stage), key=lambda copy: (copy.layout != layout, copy.in_host)):
            holding = self._ledger.holding(stage, copy)
            if holding is not None:
                return holding, copy
        return None

    def _refill(self, stage: ModelStage, drops: Keys) -> Refill:
        found = self._source(stage)
        assert found is not None, f"{stage} has no whole copy"
        holding, copy = found
        target = Holding.by_device(self._ledger.plan[stage].layout, {d: key.rank for d, key in self._lost(stage)})
        return Refill(stage, holding, target, drops, source_in_host=copy.in_host)

    def _offload(self, stages: Iterable[ModelStage], drops: Keys) -> Refill | None:
        """The copy to host memory of the smallest model-stage that is whole on devices alone and fits there."""
        found: list[tuple[int, Refill]] = []
        for stage in stages:
            source = self._source(stage)
            if source is None or source[1].in_host:
                continue
            firsts = {rank: device for device, rank in reversed(source[0].ranks)}
            unit = Holding.by_device(source[0].layout, {device: rank for rank, device in firsts.items()})
            refill = Refill(stage, source[0], unit, drops, target_in_host=True)
            if self._fits_in_host(refill.built):
                found.append((sum(self._size(key) for _, key in refill.built), refill))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _strike_surplus(self) -> Keys:
        """Strike out what the old plan does not name, of every model-stage that is whole without it."""
        surplus: Buffers = []
        for stage in self._ledger.stages:
            old = set(self._old.get(stage, ()))
            others = [
                (d, key) for d, keys in self._ledger.buffers(stage).items() for key in keys if (d, key) not in old
            ]
            ranks = {key.rank for device, key in old if self._ledger.lives(device, key)}
            if not old or len(ranks) == self._ledger.plan[stage].layout.num_ranks:
                surplus += others
            elif any(copy.in_host for copy in self._ledger.copies(stage)):
                surplus += [(device, key) for device, key in others if not key.in_host]
        return self._ledger.strike(surplus)

    def _size(self, key: BufferKey) -> int:
        state = self._states[key.model_stage]
        return flat_numel(state.spec, key.layout, key.rank) * state.element_bytes

    def _fits(self, buffers: Buffers) -> bool:
        """Whether every device has room for its buffers beside those that live on it."""
        if self._table is None:
            return True
        used, _ = self._in_use(self._table)
        for device, key in buffers:
            if device < self._table.size:
                used[device] += self._size(key)
        devices = [device for device, _ in buffers if device < self._table.size]
        return bool((used[devices] <= self._table.limit_bytes[devices]).all())

    def _fits_in_host(self, buffers: Buffers) -> bool:
        if self._table is None:
            return True
        _, host_used = self._in_use(self._table)
        for device, key in buffers:
            host_used[self._table.node[device]] += self._size(key)
        return bool((host_used <= self._table.host_bytes).all())

    def _in_use(self, table: DeviceTable) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of living buffers: [max id + 1] on every device, [num_nodes] in host memory."""
        used, host_used = np.zeros(table.size, dtype=np.int64), np.zeros(len(table.host_bytes), dtype=np.int64)
        for stage in self._ledger.stages:
            for device, keys in self._ledger.buffers(stage).items():
                for key in keys:
                    if device >= table.size:
                        continue
                    if key.in_host:
                        host_used[table.node[device]] += self._size(key)
                    else:
                        used[device] += self._size(key)
        return used, host_used
