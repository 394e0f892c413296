"""Digests of what moved: the source takes them of its own memory, the receiver of its destination.

A digest is the xxh3 hash of one run of one kind of state. Nothing here decides what follows from a difference.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
import xxhash

from nereus.shards.moves import Move, Run, buckets
from nereus.shards.state import Side, StateKind, strided

Digests = dict[tuple[int, int, StateKind], tuple[int, ...]]
"""(source device, target device, kind) -> one digest a run, in the order of the move's runs."""


def move_digests(
    move: Move, flats: Mapping[StateKind, torch.Tensor], side: Side, *, kinds: Iterable[StateKind], bucket_bytes: int
) -> Digests:
    """The digests of one move on one side."""
    return {
        (move.source, move.target, kind): tuple(
            _run_digest(flats[kind], run, side, bucket_bytes=bucket_bytes) for run in move.runs
        )
        for kind in kinds
    }


def _run_digest(flat: torch.Tensor, run: Run, side: Side, *, bucket_bytes: int) -> int:
    state = xxhash.xxh3_64()
    for lot in buckets([run], max(bucket_bytes // flat.element_size(), 1)):
        for part in lot:
            state.update(_as_bytes(strided(flat, part, side)))
    return int(state.intdigest())


def _as_bytes(view: torch.Tensor) -> memoryview:
    """The elements row by row; a copy only where rows are apart or the memory is not the processor's."""
    return view.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")


def first_difference(sent: Digests, received: Digests) -> str | None:
    """What is missing or differs, in words; None where every piece arrived as it was sent."""
    for key in _keys(sent, received):
        source, target, kind = key
        what = f"{kind} from device {source} to device {target}"
        if key not in received:
            return f"{what} did not arrive"
        if key not in sent:
            return f"{what} has no sender"
        if sent[key] != received[key]:
            bad = sum(a != b for a, b in zip(sent[key], received[key], strict=False))
            return f"{what}: {bad or 'all'} of {len(sent[key])} checksums differ"
    return None


def _keys(sent: Digests, received: Digests) -> Iterator[tuple[int, int, StateKind]]:
    yield from sent
    yield from (key for key in received if key not in sent)
