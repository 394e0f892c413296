"""Counted overlaps against intersecting the boxes of every parameter."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.model import Head, ModelSpec
from nereus.plan import Layout
from nereus.shards.boxes import flat_numel, held_numel, shard_table, shards
from nereus.shards.overlap import allocated, common_layout, enclosing_ranks, held, overlap

SPEC = ModelSpec("llama", num_layers=5, hidden=16, num_heads=12, num_kv_heads=4, head_dim=4, ffn=37, vocab=101)
SPECS = {
    "uneven": SPEC,
    "tied": dataclasses.replace(SPEC, tied=True),
    "biased": dataclasses.replace(SPEC, family="qwen2", qkv_bias=True, num_kv_heads=2),
    "normed": dataclasses.replace(SPEC, family="qwen3", qk_norm=True, num_kv_heads=12),
    "score": dataclasses.replace(SPEC, head=Head.SCORE),
    "seven": dataclasses.replace(SPEC, num_heads=14, num_kv_heads=7),
}
layouts = st.builds(Layout, tp=st.sampled_from([1, 2, 3, 4, 6, 7, 12]), pp=st.integers(1, 5))


def fits(spec: ModelSpec, layout: Layout) -> bool:
    return spec.num_heads % layout.tp == 0


def slow_overlap(spec: ModelSpec, a: Layout, rank_a: int, b: Layout, rank_b: int) -> int:
    table = shard_table(spec, b, rank_b)
    total = 0
    for shard in shards(spec, a, rank_a):
        if shard.param.name in table:
            common = shard.box.intersect(table[shard.param.name].box)
            total += common.numel if common else 0
    return total


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(SPECS)), a=layouts, b=layouts)
def test_overlap_counts_what_box_intersection_finds(name: str, a: Layout, b: Layout) -> None:
    spec = SPECS[name]
    if not (fits(spec, a) and fits(spec, b)):
        return
    table = overlap(spec, a, b)
    for rank_a in range(0, a.num_ranks, 3):
        for rank_b in range(0, b.num_ranks, 2):
            assert table[rank_a, rank_b] == slow_overlap(spec, a, rank_a, b, rank_b)


@pytest.mark.parametrize("name", SPECS)
def test_held_and_allocated_elements_are_those_of_the_flat_buffers(name: str) -> None:
    spec = SPECS[name]
    for layout in (Layout(tp, pp) for tp in spec.valid_tp for pp in range(1, spec.num_layers + 1)):
        ranks = range(layout.num_ranks)
        assert held(spec, layout).tolist() == [held_numel(spec, layout, rank) for rank in ranks]
        assert allocated(spec, layout).tolist() == [flat_numel(spec, layout, rank) for rank in ranks]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(SPECS)), a=layouts, b=layouts)
def test_a_rank_of_the_common_layout_holds_all_that_the_ranks_it_encloses_hold(name: str, a: Layout, b: Layout) -> None:
    spec = SPECS[name]
    if not (fits(spec, a) and fits(spec, b)):
        return
    common = common_layout(a, b)
    for side in (a, b):
        enclosing = enclosing_ranks(side, common)
        inside = overlap(spec, side, common)[np.arange(side.num_ranks), enclosing]
        assert inside.tolist() == held(spec, side).tolist()
