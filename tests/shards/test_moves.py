"""A plan of moves fills every target buffer from the source buffers and sends nothing that is already there."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.model import Head, ModelSpec
from nereus.plan import Layout, StagePlan, parse_stage_plan
from nereus.shards.boxes import ALIGN_ELEMENTS, flat_numel, shards
from nereus.shards.moves import Holding, Move, Moves, Run, buckets, lower_bound_numel, plan_moves
from nereus.shards.state import shard_view

TINY = ModelSpec("qwen3", 3, 10, 6, 2, 3, 13, 11, qk_norm=True)
SPECS = (
    TINY,
    ModelSpec("llama", 4, 16, 4, 4, 4, 24, 32, tied=True),
    ModelSpec("qwen2", 5, 7, 7, 1, 1, 9, 5, qkv_bias=True),
    ModelSpec("mistral", 2, 12, 12, 3, 2, 513, 101),
    ModelSpec("qwen3", 3, 10, 6, 2, 3, 13, 11, qk_norm=True, head=Head.SCORE),
)


def logical(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Distinct values for every element of every parameter."""
    values: dict[str, torch.Tensor] = {}
    count = 1
    for param in spec.params:
        values[param.name] = torch.arange(count, count + param.numel, dtype=torch.float64).view(param.shape)
        count += param.numel
    return values


def cut_buffers(spec: ModelSpec, holding: Holding) -> dict[int, torch.Tensor]:
    """The slow obvious way: every buffer sliced from the whole tensors; gaps are zero."""
    values, buffers = logical(spec), {}
    for device, rank in holding.ranks:
        flat = torch.zeros(flat_numel(spec, holding.layout, rank), dtype=torch.float64)
        for shard in shards(spec, holding.layout, rank):
            slices = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
            shard_view(flat, shard).copy_(values[shard.param.name][slices])
        buffers[device] = flat
    return buffers


def apply(move: Move, source: torch.Tensor, target: torch.Tensor, written: torch.Tensor) -> None:
    for run in move.runs:
        there = target.as_strided((run.rows, run.row_numel), (run.target_stride, 1), run.target_offset)
        there.copy_(source.as_strided((run.rows, run.row_numel), (run.source_stride, 1), run.source_offset))
        written.as_strided((run.rows, run.row_numel), (run.target_stride, 1), run.target_offset).add_(1)


def check(spec: ModelSpec, moves: Moves) -> None:
    """Every target buffer is bitwise what cutting the whole tensors gives, each element written exactly once."""
    before, expected = cut_buffers(spec, moves.source), cut_buffers(spec, moves.target)
    for device, wanted in expected.items():
        flat, written = torch.zeros_like(wanted), torch.zeros_like(wanted)
        of_device = moves.of_device(device)
        for move in (*of_device.incoming, *((of_device.local,) if of_device.local else ())):
            apply(move, before[move.source], flat, written)
        assert torch.equal(flat, wanted)
        assert written.max() <= 1 and torch.equal(written * wanted, wanted)
    assert moves.numel_moved == lower_bound_numel(spec, moves.source, moves.target)
    carried = sum(run.numel - run.padding for move in moves.remote for run in move.runs)
    assert carried == moves.numel_moved


def layouts(spec: ModelSpec) -> st.SearchStrategy[Layout]:
    return st.builds(Layout, tp=st.sampled_from(spec.valid_tp), pp=st.integers(1, spec.num_layers))


@st.composite
def reshards(draw: st.DrawFn) -> tuple[ModelSpec, Holding, Holding]:
    spec = draw(st.sampled_from(SPECS))

    def holding() -> Holding:
        layout, dp = draw(layouts(spec)), draw(st.integers(1, 3))
        devices = draw(st.permutations(range(layout.num_ranks * dp + draw(st.integers(0, 4)))))
        return Holding.of(StagePlan.of(layout, devices[: layout.num_ranks * dp]))

    return spec, holding(), holding()


@settings(max_examples=80, deadline=None)
@given(reshards())
def test_any_layout_reaches_any_layout_with_exactly_the_bytes_it_lacks(
    case: tuple[ModelSpec, Holding, Holding],
) -> None:
    spec, source, target = case
    check(spec, plan_moves(spec, source, target))


@settings(max_examples=40, deadline=None)
@given(reshards(), st.integers(1, 4))
def test_sources_on_the_same_node_come_first(case: tuple[ModelSpec, Holding, Holding], per_node: int) -> None:
    spec, source, target = case
    node_of: Callable[[int], str] = lambda device: f"node{device // per_node}"  # noqa: E731
    moves = plan_moves(spec, source, target, node_of=node_of)
    check(spec, moves)
    for move in moves.remote:
        assert move.same_node == (node_of(move.source) == node_of(move.target))
    near = {node_of(device) for device in source.devices}
    if source.layout.num_ranks == 1:
        assert all(move.same_node for move in moves.remote if node_of(move.target) in near)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("d1t1p1@0", "d2t1p1@0-1"),
        ("d2t2p1@0-3", "d4t2p1@0-7"),
        ("d1t2p1@0-1", "d1t6p1@0-5"),
        ("d1t6p1@0-5", "d1t3p2@0-5"),
        ("d1t1p1@0", "d1t1p3@0-2"),
        ("d1t2p3@0-5", "d2t3p1@3-8"),
        ("d3t1p1@0-2", "d1t1p1@7"),
        ("d1t6p3@0-17", "d1t1p1@17"),
    ],
)
def test_named_transitions_reach_the_lower_bound(before: str, after: str) -> None:
    source, target = parse_stage_plan(before), parse_stage_plan(after)
    check(TINY, plan_moves(TINY, Holding.of(source), Holding.of(target)))


def test_an_unchanged_buffer_is_kept_and_nothing_moves() -> None:
    plan = parse_stage_plan("d2t3p1@0-5")
    moves = plan_moves(TINY, Holding.of(plan), Holding.of(plan))
    assert moves.kept == set(range(6)) and moves.remote == ()


def test_extend_is_one_contiguous_run_a_pair() -> None:
    for spec in SPECS[:2]:
        source, target = parse_stage_plan("d2t2p1@0-3"), parse_stage_plan("d4t2p1@0-7")
        moves = plan_moves(spec, Holding.of(source), Holding.of(target))
        assert [(m.source, m.target, len(m.runs)) for m in sorted(moves.remote, key=lambda m: m.target)] == [
            (0, 4, 1), (1, 5, 1), (2, 6, 1), (3, 7, 1),
        ]  # fmt: skip
        assert all(run.padding < ALIGN_ELEMENTS * len(spec.params) for m in moves.remote for run in m.runs)


def test_extend_shares_the_load_over_the_replicas_that_hold_it() -> None:
    spec = SPECS[1]
    source, target = parse_stage_plan("d2t1p1@0-1"), parse_stage_plan("d3t1p1@0-2")
    moves = plan_moves(spec, Holding.of(source), Holding.of(target))
    sent = {m.source: m.numel for m in moves.remote}
    largest = max(param.numel for param in spec.params)
    assert set(sent) == {0, 1} and abs(sent[0] - sent[1]) <= 2 * largest
    assert all(len(m.runs) == 1 for m in moves.remote)


def test_reshard_shares_the_load_over_the_replicas_that_hold_it() -> None:
    spec = SPECS[1]
    source, target = parse_stage_plan("d4t1p1@0-3"), parse_stage_plan("d2t2p1@4-7")
    moves = plan_moves(spec, Holding.of(source), Holding.of(target))
    sent = [sum(m.numel for m in moves.remote if m.source == device) for device in range(4)]
    assert max(sent) - min(sent) <= max(param.numel for param in spec.params)


def test_merge_moves_nothing_a_rank_already_holds() -> None:
    moves = plan_moves(TINY, Holding.of(parse_stage_plan("d6t1p1@0-5")), Holding.of(parse_stage_plan("d1t6p1@0-5")))
    check(TINY, moves)
    assert moves.remote == () and len(moves.local) == 6


def test_a_plan_reads_only_from_the_sources_it_is_given() -> None:
    source = Holding.by_device(Layout(tp=2), {4: 0, 5: 1})
    target = Holding.by_device(Layout(), {0: 0, 4: 0})
    moves = plan_moves(TINY, source, target)
    check(TINY, moves)
    assert {m.source for m in moves.remote} <= {4, 5}


def test_a_piece_without_a_holder_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="no source holds it"):
        plan_moves(TINY, Holding.by_device(Layout(tp=2), {0: 0}), Holding.by_device(Layout(), {1: 0}))


def test_no_device_sends_to_two_in_one_round() -> None:
    moves = plan_moves(TINY, Holding.of(parse_stage_plan("d1t6p1@0-5")), Holding.of(parse_stage_plan("d6t1p1@0-5")))
    assert [m.order for m in moves.remote] == list(range(30))
    for start in range(0, 30, 6):
        assert len({m.source for m in moves.remote[start : start + 6]}) == 6
        assert len({m.target for m in moves.remote[start : start + 6]}) == 6


def test_the_fingerprint_tells_plans_apart() -> None:
    plans = [parse_stage_plan(text) for text in ("d1t2p1@0-1", "d2t1p1@0-1", "d1t1p2@0-1", "d1t2p1@1,0")]
    prints = {plan_moves(TINY, Holding.of(plans[0]), Holding.of(plan)).fingerprint for plan in plans}
    assert len(prints) == 4 and all(0 <= value < 2**63 for value in prints)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.builds(Run, st.just(0), st.just(0), st.integers(1, 40), st.integers(1, 9), st.just(50), st.just(60)),
             min_size=1, max_size=8),
    st.integers(1, 64),
)  # fmt: skip
def test_buckets_hold_every_element_once_and_never_more_than_their_limit(runs: list[Run], limit: int) -> None:
    shifted = [
        dataclasses.replace(run, source_offset=500 * i, target_offset=600 * i) for i, run in enumerate(runs)
    ]  # fmt: skip

    def elements(parts: list[Run]) -> list[tuple[int, int]]:
        return sorted(
            (run.source_offset + r * run.source_stride + c, run.target_offset + r * run.target_stride + c)
            for run in parts
            for r in range(run.rows)
            for c in range(run.row_numel)
        )

    lots = list(buckets(shifted, limit))
    assert all(sum(run.numel for run in lot) <= limit for lot in lots)
    assert elements([run for lot in lots for run in lot]) == elements(shifted)


def test_a_published_model_is_planned_quickly() -> None:
    spec = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256)
    source, target = parse_stage_plan("d2t4p2@0-15"), parse_stage_plan("d1t8p2@0-15")
    moves = plan_moves(spec, Holding.of(source), Holding.of(target))
    assert moves.numel_moved == lower_bound_numel(spec, moves.source, moves.target)
