"""Boxes of a unit cover every logical tensor, owned ones exactly once; intersections and differences are exact."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.model import Axis, Head, ModelSpec
from nereus.plan import Layout
from nereus.shards.boxes import (
    ALIGN_ELEMENTS,
    Box,
    axis_range,
    flat_numel,
    held_numel,
    holders,
    layer_range,
    shard_table,
    shards,
)

SPECS = {
    "grouped heads": ModelSpec("llama", 4, 16, 8, 2, 4, 24, 33),
    "tied": ModelSpec("llama", 3, 12, 6, 6, 2, 10, 7, tied=True),
    "seven heads": ModelSpec("qwen2", 5, 14, 7, 1, 2, 9, 5, qkv_bias=True),
    "q/k norms": ModelSpec("qwen3", 2, 10, 6, 3, 5, 513, 3, qk_norm=True),
    "scalar head": ModelSpec("mistral", 3, 8, 4, 2, 2, 7, 9, head=Head.SCORE),
    "tied, fewer rows than ranks": ModelSpec("qwen3", 2, 6, 12, 3, 1, 5, 4, tied=True, qk_norm=True),
}
CASES = [
    pytest.param(spec, Layout(tp, pp), id=f"{name} {Layout(tp, pp)}")
    for name, spec in SPECS.items()
    for tp, pp in itertools.product(spec.valid_tp, range(1, spec.num_layers + 1))
]


def mask(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Ones inside the box."""
    ones = torch.zeros(shape, dtype=torch.int64)
    ones[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = 1
    return ones


@pytest.mark.parametrize(("spec", "layout"), CASES)
def test_owned_boxes_cover_every_tensor_exactly_once(spec: ModelSpec, layout: Layout) -> None:
    owned = {param.name: torch.zeros(param.shape, dtype=torch.int64) for param in spec.params}
    held = {param.name: torch.zeros(param.shape, dtype=torch.int64) for param in spec.params}
    for rank in range(layout.num_ranks):
        for shard in shards(spec, layout, rank):
            held[shard.param.name] += mask(shard.param.shape, shard.box)
            if shard.owned is not None:
                owned[shard.param.name] += mask(shard.param.shape, shard.owned)
                assert shard.owned.intersect(shard.box) == shard.owned or shard.owned.numel == 0
    for param in spec.params:
        assert bool((owned[param.name] == 1).all()), param.name
        assert bool((held[param.name] >= 1).all()), param.name
        cut = param.dim is not None and param.axis is not Axis.KV_HEADS
        if cut and not (param.first and param.last and layout.pp > 1):
            assert bool((held[param.name] == 1).all()), f"{param.name} is cut, so no element is held twice"


@pytest.mark.parametrize(("spec", "layout"), CASES)
def test_every_query_head_finds_its_key_value_head_on_its_rank(spec: ModelSpec, layout: Layout) -> None:
    group = spec.num_heads // spec.num_kv_heads
    for tp_rank in range(layout.tp):
        heads = axis_range(spec, Axis.HEADS, layout.tp, tp_rank)
        assert {head // group for head in heads} == set(axis_range(spec, Axis.KV_HEADS, layout.tp, tp_rank))


@pytest.mark.parametrize(("spec", "layout"), CASES)
def test_replicas_are_marked(spec: ModelSpec, layout: Layout) -> None:
    for rank in range(layout.num_ranks):
        for shard in shards(spec, layout, rank):
            norm = shard.param.dim is None
            if norm:
                assert shard.replicated == (layout.tp_rank(rank) > 0)
            if shard.param.first and shard.param.last and layout.pp_rank(rank) > 0:
                assert shard.owned is None
            if shard.replicated:
                assert layout.num_ranks > 1


@pytest.mark.parametrize(("spec", "layout"), CASES)
def test_stored_tensors_do_not_overlap_and_fused_ones_are_adjacent(spec: ModelSpec, layout: Layout) -> None:
    for rank in range(layout.num_ranks):
        held = shards(spec, layout, rank)
        for before, after in itertools.pairwise(held):
            end = before.offset + before.box.numel
            fused = before.param.fused is not None and (before.param.layer, before.param.fused) == (
                after.param.layer,
                after.param.fused,
            )
            assert after.offset == end if fused else 0 <= after.offset - end < ALIGN_ELEMENTS
            assert fused or after.offset % ALIGN_ELEMENTS == 0
        assert flat_numel(spec, layout, rank) >= held[-1].offset + held[-1].box.numel
        assert held_numel(spec, layout, rank) == sum(shard.box.numel for shard in held)
        assert flat_numel(spec, layout, rank) - held_numel(spec, layout, rank) < ALIGN_ELEMENTS * (len(held) + 1)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(SPECS.values())), st.data())
def test_a_target_box_is_the_disjoint_union_of_its_intersections_with_the_sources(
    spec: ModelSpec, data: st.DataObject
) -> None:
    def layout() -> Layout:
        return data.draw(st.builds(Layout, tp=st.sampled_from(spec.valid_tp), pp=st.integers(1, spec.num_layers)))

    source, target = layout(), layout()
    rank = data.draw(st.integers(0, target.num_ranks - 1))
    for shard in shards(spec, target, rank):
        covered = torch.zeros(shard.param.shape, dtype=torch.int64)
        for _, held in holders(spec, source, shard.param):
            if held.owned is not None and (common := held.owned.intersect(shard.box)) is not None:
                covered += mask(shard.param.shape, common)
        assert torch.equal(covered, mask(shard.param.shape, shard.box))


boxes = st.integers(1, 3).flatmap(
    lambda dims: st.lists(
        st.tuples(
            *[
                st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda ends: tuple(sorted(ends)))
                for _ in range(dims)
            ]
        ).map(lambda ranges: Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))),
        min_size=2,
        max_size=2,
    )
)


@settings(max_examples=300, deadline=None)
@given(boxes)
def test_intersection_and_difference_split_a_box_exactly(pair: list[Box]) -> None:
    one, other = pair
    shape = (6,) * len(one.start)
    common, rest = one.intersect(other), one.subtract(other)
    parts = [*rest, *([common] if common is not None else [])]
    assert torch.equal(
        sum((mask(shape, part) for part in parts), torch.zeros(shape, dtype=torch.int64)), mask(shape, one)
    )
    assert common is None or common == other.intersect(one)
    assert all(part.numel and part.intersect(other) is None for part in rest)
    if common is not None:
        whole = torch.arange(6 ** len(shape)).view(shape)
        of_one = whole[tuple(slice(a, b) for a, b in zip(one.start, one.stop, strict=True))]
        of_common = whole[tuple(slice(a, b) for a, b in zip(common.start, common.stop, strict=True))]
        assert torch.equal(of_one[common.within(one)], of_common)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.data())
def test_pipeline_stages_share_the_layers_to_within_one(num_layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, num_layers))
    ranges = [layer_range(num_layers, pp, rank) for rank in range(pp)]
    assert [layer for part in ranges for layer in part] == list(range(num_layers))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_tied_embedding_is_held_at_both_ends_of_the_pipeline_and_counts_once() -> None:
    spec, name = SPECS["tied"], "model.embed_tokens.weight"
    first, last = shard_table(spec, Layout(pp=3), 0)[name], shard_table(spec, Layout(pp=3), 2)[name]
    assert first.box == last.box == Box.whole((7, 12))
    assert first.owned == first.box and last.owned is None
    assert name not in shard_table(spec, Layout(pp=3), 1)


def test_seven_query_heads_are_cut_in_seven_and_share_one_key_value_head() -> None:
    spec = SPECS["seven heads"]
    assert spec.valid_tp == (1, 7)
    held = [shard_table(spec, Layout(tp=7), rank)["model.layers.0.self_attn.k_proj.weight"] for rank in range(7)]
    assert len({shard.box for shard in held}) == 1
    assert [shard.owned is not None for shard in held] == [True] + [False] * 6


def test_a_rank_without_vocabulary_rows_holds_an_empty_box() -> None:
    spec = SPECS["tied, fewer rows than ranks"]
    held = [shard_table(spec, Layout(tp=12), rank)["model.embed_tokens.weight"].box.numel for rank in range(12)]
    assert sum(held) == 4 * 6 and held.count(0) == 8
