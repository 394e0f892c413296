"""Runs arrive bitwise whatever their size, dtype and way; staging stays within its bound; disagreement stops all."""

from datetime import timedelta

import pytest
import torch
from support import StoreFactory, run_threads

from nereus.comm.groups import GroupSpec
from nereus.engine_facts import BUCKETS_STAGED
from nereus.errors import GroupError
from nereus.model import ModelSpec
from nereus.moving.commands import DeviceOrder
from nereus.moving.transport import Exchange, pull
from nereus.moving.verify import first_difference, move_digests
from nereus.shards.moves import DeviceMoves, Move, Run
from nereus.shards.state import StateKind

LONG = timedelta(seconds=30)
KINDS = ((StateKind.PARAM, torch.bfloat16), (StateKind.EXP_AVG, torch.float32))
SIZES = (1, 7, 513, 262147)
SPEC = ModelSpec("llama", 1, 4, 1, 1, 4, 4, 4)


def flats(numel: int, seed: int | None = None) -> dict[StateKind, torch.Tensor]:
    if seed is None:
        return {kind: torch.zeros(numel, dtype=dtype) for kind, dtype in KINDS}
    generator = torch.Generator().manual_seed(seed)
    return {kind: torch.randn(numel, generator=generator).to(dtype) for kind, dtype in KINDS}


def order_for(device: int, moves: list[Move], *, bucket_bytes: int = 1024, fingerprint: int = 5) -> DeviceOrder:
    devices = tuple(sorted({d for move in moves for d in (move.source, move.target)}))
    of_device = DeviceMoves(
        device, None, tuple(m for m in moves if m.target == device), tuple(m for m in moves if m.source == device)
    )
    return DeviceOrder(
        key="test", device=device, spec=SPEC, kinds=KINDS, source=None, target=None, moves=of_device, allocates=False,
        group=GroupSpec("test", devices), keeps_group=False, fingerprint=fingerprint, bucket_bytes=bucket_bytes,
    )  # fmt: skip


def scattered(numel: int) -> tuple[Run, ...]:
    """Every element of a buffer of `numel`: a contiguous head, then strided rows and their rest."""
    head = numel // 2
    width = max((numel - head) // 4, 1)
    rows = (numel - head) // width
    left = numel - head - rows * width
    runs = [Run(0, numel - head, head)] if head else []
    runs.append(Run(head, 0, width, rows, width, width))
    if left:
        runs.append(Run(numel - left, rows * width, left))
    return tuple(runs)


@pytest.mark.parametrize("numel", SIZES)
def test_a_pulled_move_arrives_bitwise(numel: int) -> None:
    move = Move(0, 1, scattered(numel), numel)
    source, target = flats(numel, seed=1), flats(numel)
    pull(move, source, target)
    for kind in source:
        head = numel // 2
        assert torch.equal(target[kind][numel - head :], source[kind][:head])
        assert torch.equal(target[kind][: numel - head], source[kind][head:])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bucket_bytes", [4, 1024, 1 << 22])
def test_an_exchange_equals_a_pull_and_stages_no_more_than_its_window(numel: int, bucket_bytes: int) -> None:
    if numel // bucket_bytes > 500:
        pytest.skip("one message an element takes long and shows no more than 513 elements do")
    pairs = [(0, 1), (1, 2), (2, 0)]
    moves = [Move(s, t, scattered(numel), numel, same_node=False, order=i) for i, (s, t) in enumerate(pairs)]

    def rank_main(rank: int, store: StoreFactory) -> int:
        target, expected = flats(numel), flats(numel)
        group = GroupSpec("exchange", (0, 1, 2)).join(store(), rank, timeout=LONG)
        exchange = Exchange(order_for(rank, moves, bucket_bytes=bucket_bytes), group, torch.device("cpu"))
        exchange.run(flats(numel, seed=rank), target)
        group.barrier()
        group.close()
        (incoming,) = (move for move in moves if move.target == rank)
        pull(incoming, flats(numel, seed=incoming.source), expected)
        assert all(torch.equal(target[kind], expected[kind]) for kind in target)
        return exchange.peak_staged_bytes

    assert all(peak <= BUCKETS_STAGED * bucket_bytes for peak in run_threads(3, rank_main))


def test_ranks_with_different_plans_send_nothing() -> None:
    move = Move(0, 1, (Run(0, 0, 100),), 100, same_node=False)

    def rank_main(rank: int, store: StoreFactory) -> float:
        group = GroupSpec("differ", (0, 1)).join(store(), rank, timeout=LONG)
        target = flats(100)
        with pytest.raises(GroupError, match="disagree"):
            Exchange(order_for(rank, [move], fingerprint=rank), group, torch.device("cpu")).run(
                flats(100, seed=1), target
            )
        group.close()
        return float(target[StateKind.PARAM].abs().sum())

    assert run_threads(2, rank_main) == [0.0, 0.0]


@pytest.mark.parametrize("numel", SIZES)
def test_digests_of_both_ends_agree_and_one_flipped_bit_shows(numel: int) -> None:
    move = Move(0, 1, scattered(numel), numel)
    source, target = flats(numel, seed=3), flats(numel)
    pull(move, source, target)
    sent = move_digests(move, source, "source", kinds=source, bucket_bytes=64)
    assert first_difference(sent, move_digests(move, target, "target", kinds=target, bucket_bytes=1 << 20)) is None
    target[StateKind.EXP_AVG].view(torch.uint8)[numel * 4 - 1] ^= 0x40
    problem = first_difference(sent, move_digests(move, target, "target", kinds=target, bucket_bytes=64))
    assert problem is not None and "exp_avg from device 0 to device 1" in problem


def test_a_missing_piece_is_named() -> None:
    move = Move(0, 1, (Run(0, 0, 8),), 8)
    sent = move_digests(move, flats(8, seed=1), "source", kinds=[StateKind.PARAM], bucket_bytes=64)
    assert first_difference(sent, {}) == "param from device 0 to device 1 did not arrive"
    assert first_difference({}, sent) == "param from device 0 to device 1 has no sender"
