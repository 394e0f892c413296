"""Checkpoints: whole or refused, and the same state under any layout."""

from pathlib import Path

import pytest
import torch

from nereus.checkpoint.store import CheckpointStore, Manifest, restore_rank, save_rank
from nereus.errors import CheckpointError
from nereus.model import ModelSpec
from nereus.plan import ACTOR_TRAINING, Layout
from nereus.shards.boxes import shards
from nereus.shards.state import Counters, RankState, StateKind, shard_view, state_dtypes, zeros_on

SPEC = ModelSpec("qwen2", 5, 56, 28, 4, 2, 60, 101, tied=True, qkv_bias=True)


def filled(layout: Layout) -> list[RankState]:
    """The ranks of a unit whose every logical element has a value of its own."""
    states = []
    for rank in range(layout.num_ranks):
        dtypes = state_dtypes(torch.bfloat16, trains=True)
        state = RankState.allocate(SPEC, layout, rank, dtypes=dtypes, allocator=zeros_on(torch.device("cpu")))
        for kind, flat in state.flats.items():
            generator = torch.Generator().manual_seed(len(kind))
            for param in SPEC.params:
                whole = torch.randn(param.shape, generator=generator).to(flat.dtype)
                if param.name in state:
                    shard = state.shard(param.name)
                    slices = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
                    shard_view(flat, shard).copy_(whole[slices])
        state.counters = Counters(updates=7, version=5)
        states.append(state)
    return states


def save(store: CheckpointStore, step: int, layout: Layout) -> Path:
    folder = store.begin(step)
    files = tuple(file for state in filled(layout) for file in save_rank(folder, ACTOR_TRAINING, state))
    return store.commit(Manifest(step, {ACTOR_TRAINING.name: Counters(7, 5)}, files), {ACTOR_TRAINING: SPEC})


@pytest.mark.parametrize("saved", [Layout(1, 1), Layout(4, 1), Layout(2, 2), Layout(7, 3)])
@pytest.mark.parametrize("restored", [Layout(1, 1), Layout(2, 5), Layout(4, 2), Layout(7, 1)])
def test_state_saved_under_one_layout_is_bitwise_the_same_under_another(
    tmp_path: Path, saved: Layout, restored: Layout
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 3, saved)
    folder, manifest, problems = store.latest()
    assert manifest.step == 3 and problems == []
    for wanted in filled(restored):
        state = RankState.allocate(
            SPEC,
            restored,
            wanted.rank,
            dtypes=state_dtypes(torch.bfloat16, trains=True),
            allocator=zeros_on(torch.device("cpu")),
        )
        restore_rank(folder, manifest, ACTOR_TRAINING, state)
        assert state.counters == Counters(7, 5)
        for kind in StateKind:
            for shard in shards(SPEC, restored, wanted.rank):
                assert torch.equal(shard_view(state.flats[kind], shard), shard_view(wanted.flats[kind], shard))


def test_a_checkpoint_with_a_damaged_file_is_passed_over_and_the_file_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, Layout(2, 1))
    newest = save(store, 2, Layout(2, 1))
    victim = newest / "actor-training.rank1.exp_avg.bin"
    whole = victim.read_bytes()
    for damage in (whole[:-8], bytes([whole[0] ^ 1]) + whole[1:], None):
        victim.unlink()
        if damage is not None:
            victim.write_bytes(damage)
        folder, manifest, problems = store.latest()
        assert manifest.step == 1 and folder.name == "step-1"
        assert len(problems) == 1 and victim.name in problems[0]
        victim.write_bytes(whole)
    assert store.latest()[1].step == 2


def test_a_save_that_did_not_end_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, Layout(1, 2))
    folder = store.begin(2)
    files = [file for state in filled(Layout(1, 2)) for file in save_rank(folder, ACTOR_TRAINING, state)]
    assert store.latest()[1].step == 1
    with pytest.raises(CheckpointError, match="rank 1"):
        missing = tuple(file for file in files if file.rank == 0)
        store.commit(Manifest(2, {ACTOR_TRAINING.name: Counters()}, missing), {ACTOR_TRAINING: SPEC})
    assert store.latest()[1].step == 1


def test_nothing_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        CheckpointStore(tmp_path / "none").latest()
