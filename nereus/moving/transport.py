"""Carries the runs of a plan between flat buffers: in place within a node, through a group between nodes.

    same node    receiver maps the sender's buffer and copies each run once
    other node   sender packs lots of at most a bucket --> group --> receiver unpacks; a lot that is contiguous on a
                 side is neither packed nor unpacked there

Every rank posts its sends and receives in the one global order of the plan: the first lot of every move, then the
second of every move, so that all pairs are busy at once. It waits for its oldest lot only when as many
buckets are staged as may be (`BUCKETS_STAGED`), so whichever lot is first in the order always has both ends posted, and
no more are ever staged. Ranks agree on a fingerprint before anything is sent.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch

from nereus.comm.groups import Group, Work
from nereus.engine_facts import BUCKETS_STAGED
from nereus.moving.commands import DeviceOrder
from nereus.shards.moves import Move, Run, buckets
from nereus.shards.state import Side, StateKind, strided

DIRECT_BYTES = 512 << 10
"""A run of at least so many bytes that is contiguous on both ends is a lot of its own and is never staged."""

Flats = Mapping[StateKind, torch.Tensor]


def pull(move: Move, source: Flats, target: Flats) -> None:
    """Copy a move from one buffer to another that this process reaches both, one strided copy a run."""
    for kind, flat in target.items():
        for run in move.runs:
            strided(flat, run, "target").copy_(strided(source[kind], run, "source"))


@dataclasses.dataclass(slots=True)
class _Lot:
    """One send or receive: consecutive runs of one kind of one move. `device`: where the group's tensors lie."""

    move: Move
    flat: torch.Tensor
    runs: tuple[Run, ...]
    sends: bool
    device: torch.device

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)

    @property
    def direct(self) -> torch.Tensor | None:
        """The lot as it lies in the flat buffer, where it is contiguous there and the group can send from there."""
        if self.flat.device.type != self.device.type:
            return None
        spans = [_span(run, self._side) for run in self.runs]
        if None in spans or any(a.stop != b.start for a, b in itertools.pairwise(spans) if a and b):
            return None
        return None if spans[0] is None else self.flat.narrow(0, spans[0].start, self.numel)

    def pack(self, staging: torch.Tensor) -> None:
        for run, part in self._parts(staging):
            part.copy_(strided(self.flat, run, "source"))

    def unpack(self, staging: torch.Tensor) -> None:
        for run, part in self._parts(staging):
            strided(self.flat, run, "target").copy_(part)

    @property
    def _side(self) -> Side:
        return "source" if self.sends else "target"

    def _parts(self, staging: torch.Tensor) -> Iterator[tuple[Run, torch.Tensor]]:
        offset = 0
        for run in self.runs:
            yield run, staging.narrow(0, offset, run.numel).view(run.rows, run.row_numel)
            offset += run.numel


def _span(run: Run, side: Side) -> range | None:
    """The elements of a run on one side, where they follow each other without a gap."""
    offset, stride = (
        (run.source_offset, run.source_stride) if side == "source" else (run.target_offset, run.target_stride)
    )
    return range(offset, offset + run.numel) if run.rows == 1 or stride == run.row_numel else None


def lots(runs: Iterable[Run], *, bucket_numel: int, direct_numel: int) -> Iterator[tuple[Run, ...]]:
    """Runs in lots of at most a bucket, the same on both ends; long contiguous runs apart from those to be packed."""

    def apart(run: Run) -> bool:
        return run.numel >= direct_numel and _span(run, "source") is not None and _span(run, "target") is not None

    for is_apart, group in itertools.groupby(runs, apart):
        for run in group if is_apart else (tuple(group),):
            yield from buckets((run,) if isinstance(run, Run) else run, bucket_numel)


class Exchange:
    """One rank's sends and receives of one move over a group."""

    def __init__(self, order: DeviceOrder, group: Group, device: torch.device) -> None:
        """device: where the tensors must lie that the group sends; a source in host memory is packed there."""
        assert order.group is not None
        self._device = device
        self._order, self._group, self._peers = order, group, order.group.devices
        self._flying: collections.deque[tuple[Work, _Lot, torch.Tensor | None]] = collections.deque()
        self._free: list[torch.Tensor] = []
        self._num_staging = 0
        self.peak_staged_bytes = 0

    def run(self, source: Flats | None, target: Flats | None) -> None:
        """Send and receive everything; raises GroupError where the ranks' plans differ or a peer is lost."""
        self._group.agree(self._order.fingerprint, device=self._device)
        for lot in self._lots(source, target):
            self._post(lot)
        while self._flying:
            self._finish()

    def _lots(self, source: Flats | None, target: Flats | None) -> Iterator[_Lot]:
        """This rank's lots in the global order: the first of every move, then the second of every move, ..."""
        moves = self._order.moves
        mine = [(move, True, source) for move in moves.outgoing] + [(move, False, target) for move in moves.incoming]
        of_moves = [self._of_move(move, sends, flats) for move, sends, flats in mine if not move.same_node and flats]
        merged = heapq.merge(*map(enumerate, of_moves), key=lambda item: (item[0], item[1].move.order))
        return (lot for _, lot in merged)

    def _of_move(self, move: Move, sends: bool, flats: Flats) -> Iterator[_Lot]:
        for kind, dtype in self._order.kinds:
            bucket = max(self._order.bucket_bytes // dtype.itemsize, 1)
            for runs in lots(move.runs, bucket_numel=bucket, direct_numel=DIRECT_BYTES // dtype.itemsize):
                yield _Lot(move, flats[kind], runs, sends, self._device)

    def _post(self, lot: _Lot) -> None:
        tensor, staging = lot.direct, None
        if tensor is None:
            staging = self._staging(lot.numel * lot.flat.itemsize)
            tensor = staging[: lot.numel * lot.flat.itemsize].view(lot.flat.dtype)
            if lot.sends:
                lot.pack(tensor)
        peer = self._peers.index(lot.move.target if lot.sends else lot.move.source)
        start = self._group.send if lot.sends else self._group.irecv
        self._flying.append((start(tensor, peer, lot.move.order), lot, staging))

    def _finish(self) -> None:
        work, lot, staging = self._flying.popleft()
        work.wait()
        if staging is not None:
            if not lot.sends:
                lot.unpack(staging[: lot.numel * lot.flat.itemsize].view(lot.flat.dtype))
            self._free.append(staging)

    def _staging(self, nbytes: int) -> torch.Tensor:
        """Room for a lot; used again by later lots, because touching new memory costs as much as a copy."""
        while not self._free and self._num_staging == BUCKETS_STAGED:
            self._finish()
        if self._free:
            return self._free.pop()
        size = max(self._order.bucket_bytes, nbytes)
        self._num_staging += 1
        self.peak_staged_bytes += size
        return torch.empty(size, dtype=torch.uint8, device=self._device)
