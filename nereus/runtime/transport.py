"""Carries the runs of a plan between flat buffers: in place within a node, through a group between nodes.

    same node    receiver maps the sender's buffer and copies each run once
    other node   sender packs lots of at most a bucket --> group --> receiver unpacks; a contiguous lot is neither
                 packed nor unpacked

Every rank posts its sends and receives in the one global order of the plan and has at most `WINDOW` of them in flight,
so whichever is first in that order always has both ends posted, and staging memory stays below WINDOW buckets. Ranks
agree on a fingerprint before anything is sent.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping

import torch

from nereus.engines.state import StateKind
from nereus.runtime.groups import Group, Work
from nereus.transition.orders import DeviceOrder
from nereus.transition.reshard import Move, Run, buckets
from nereus.transition.verify import strided

WINDOW = 4
"""Lots a rank has in flight at once."""

Flats = Mapping[StateKind, torch.Tensor]


def pull(move: Move, source: Flats, target: Flats) -> None:
    """Copy a move from one buffer to another that this process reaches both, one strided copy a run."""
    for kind, flat in target.items():
        for run in move.runs:
            strided(flat, run, "target").copy_(strided(source[kind], run, "source"))


@dataclasses.dataclass(slots=True)
class _Lot:
    """One send or receive: consecutive runs of one kind of one move."""

    move: Move
    flat: torch.Tensor
    runs: tuple[Run, ...]
    sends: bool

    @property
    def direct(self) -> torch.Tensor | None:
        """The lot as it lies in the flat buffer, where it is contiguous there."""
        if len(self.runs) > 1 or self.runs[0].rows > 1:
            return None
        return strided(self.flat, self.runs[0], "source" if self.sends else "target").view(-1)

    def packed(self) -> torch.Tensor:
        """The elements of the lot in a new contiguous tensor (of a lot to receive: room for them)."""
        numel = sum(run.numel for run in self.runs)
        staging = torch.empty(numel, dtype=self.flat.dtype, device=self.flat.device)
        if self.sends:
            for run, part in self._parts(staging):
                part.copy_(strided(self.flat, run, "source"))
        return staging

    def unpack(self, staging: torch.Tensor) -> None:
        for run, part in self._parts(staging):
            strided(self.flat, run, "target").copy_(part)

    def _parts(self, staging: torch.Tensor) -> Iterator[tuple[Run, torch.Tensor]]:
        offset = 0
        for run in self.runs:
            yield run, staging.narrow(0, offset, run.numel).view(run.rows, run.row_numel)
            offset += run.numel


class Exchange:
    """One rank's sends and receives of one move over a group."""

    def __init__(self, order: DeviceOrder, group: Group) -> None:
        assert order.group is not None
        self._order, self._group, self._peers = order, group, order.group.devices
        self._flying: collections.deque[tuple[Work, _Lot, torch.Tensor | None]] = collections.deque()
        self._staged_bytes = 0
        self.peak_staged_bytes = 0

    def run(self, source: Flats | None, target: Flats | None) -> None:
        """Send and receive everything; raises GroupError where the ranks' plans differ or a peer is lost."""
        device = next((flat.device for flats in (source, target) if flats for flat in flats.values()), None)
        self._group.agree(self._order.fingerprint, device=device)
        for lot in self._lots(source, target):
            if len(self._flying) == WINDOW:
                self._finish()
            self._post(lot)
        while self._flying:
            self._finish()

    def _lots(self, source: Flats | None, target: Flats | None) -> Iterator[_Lot]:
        moves = self._order.moves
        mine = [(move, True) for move in moves.outgoing] + [(move, False) for move in moves.incoming]
        for move, sends in sorted(mine, key=lambda item: item[0].order):
            flats = source if sends else target
            if move.same_node:
                continue
            assert flats is not None
            for kind, dtype in self._order.kinds:
                for runs in buckets(move.runs, max(self._order.bucket_bytes // dtype.itemsize, 1)):
                    yield _Lot(move, flats[kind], runs, sends)

    def _post(self, lot: _Lot) -> None:
        tensor, staging = lot.direct, None
        if tensor is None:
            tensor = staging = lot.packed()
            self._staged_bytes += staging.nbytes
            self.peak_staged_bytes = max(self.peak_staged_bytes, self._staged_bytes)
        peer = self._peers.index(lot.move.target if lot.sends else lot.move.source)
        start = self._group.send if lot.sends else self._group.irecv
        self._flying.append((start(tensor, peer, lot.move.order), lot, staging))

    def _finish(self) -> None:
        work, lot, staging = self._flying.popleft()
        work.wait()
        if staging is not None:
            self._staged_bytes -= staging.nbytes
            if not lot.sends:
                lot.unpack(staging)
