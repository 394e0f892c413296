"""The rollout batch: packing, picking and sharing out."""

import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.algorithms.buffer import RESPONSE_COLUMNS, SAMPLE_COLUMNS, RolloutBatch, shares
from nereus.algorithms.types import Sample

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=12)


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    rng = random.Random(len(lengths))
    return [
        Sample(
            prompt_index=i // 2,
            group_index=i % 2,
            prompt_tokens=tuple(rng.randrange(99) for _ in range(prompt)),
            response_tokens=tuple(rng.randrange(99) for _ in range(response)),
            finished=i % 3 == 0,
            policy_version=i,
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


def batch_of(samples: list[Sample]) -> RolloutBatch:
    batch = RolloutBatch.from_samples(samples)
    return batch.with_columns(
        values=torch.arange(batch.num_response_tokens, dtype=torch.float64),
        scores=torch.arange(batch.num_samples, dtype=torch.float64),
    )


@given(st.integers(0, 50), st.integers(1, 20))
@settings(deadline=None, max_examples=100)
def test_shares_cover_the_range_in_order_and_differ_by_at_most_one(num: int, parts: int) -> None:
    ranges = shares(num, parts)
    assert [i for r in ranges for i in r] == list(range(num))
    assert len(ranges) == parts and max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(LENGTHS, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_packing_sorts_samples_by_place_whatever_finished_first(
    lengths: list[tuple[int, int]], rng: random.Random
) -> None:
    samples = samples_of(lengths)
    shuffled = samples[:]
    rng.shuffle(shuffled)
    batch = RolloutBatch.from_samples(shuffled)
    for i, sample in enumerate(samples):
        assert tuple(batch.prompt(i)) == sample.prompt_tokens
        assert tuple(batch.response(i)) == sample.response_tokens
        assert (int(batch.prompt_index[i]), int(batch.group_index[i])) == sample.place
        assert bool(batch.finished[i]) == sample.finished
        assert int(batch.policy_version[i]) == sample.policy_version


@given(LENGTHS, st.data())
@settings(deadline=None, max_examples=50)
def test_select_picks_what_a_loop_over_samples_picks(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    batch = batch_of(samples_of(lengths))
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    picked = batch.select(chosen)
    rows = torch.split(batch.column("values"), [r for _, r in lengths])
    assert picked.column("values").tolist() == [float(v) for i in chosen for v in rows[i]]
    assert picked.column("scores").tolist() == [float(i) for i in chosen]
    assert [picked.response(i) for i in range(len(chosen))] == [batch.response(i) for i in chosen]
    assert [picked.prompt(i) for i in range(len(chosen))] == [batch.prompt(i) for i in chosen]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_shares_and_micro_batches_joined_in_order_are_the_batch(
    lengths: list[tuple[int, int]], parts: int, size: int
) -> None:
    batch = batch_of(samples_of(lengths))
    pieces = [micro for share in batch.shares(parts) for micro in share.micro_batches(size)]
    assert all(piece.num_samples <= size for piece in pieces)
    for name in (*SAMPLE_COLUMNS, *RESPONSE_COLUMNS, "tokens"):
        whole = getattr(batch, name)
        parts_of_it = [getattr(piece, name) for piece in pieces]
        assert (whole is None) == all(part is None for part in parts_of_it)
        assert whole is None or torch.equal(whole, torch.cat(parts_of_it))


def test_a_share_is_sent_without_the_rest_of_the_batch() -> None:
    batch = batch_of(samples_of([(3, 2000)] * 20))
    share = batch.shares(20)[7]
    assert len(pickle.dumps(share)) < len(pickle.dumps(batch)) / 10
    assert torch.equal(pickle.loads(pickle.dumps(share)).tokens, share.tokens)


def test_counts_leave_out_masked_tokens_and_fully_masked_samples() -> None:
    batch = batch_of(samples_of([(1, 4), (2, 3), (1, 0), (1, 5)]))
    mask = batch.response_mask.clone()
    mask[4:7] = False  # the second sample
    mask[9] = False
    masked = batch.with_columns(response_mask=mask)
    assert masked.valid_lengths.tolist() == [4, 0, 0, 4]
    assert (masked.counts.tokens, masked.counts.sequences) == (8, 2)
    assert (batch.counts.tokens, batch.counts.sequences) == (12, 3)


def test_two_samples_at_one_place_are_refused() -> None:
    sample = samples_of([(1, 2)])[0]
    with pytest.raises(AssertionError, match="same place"):
        RolloutBatch.from_samples([sample, sample])


def test_a_column_of_the_wrong_size_is_refused() -> None:
    batch = batch_of(samples_of([(1, 2), (1, 3)]))
    with pytest.raises(AssertionError, match="advantages"):
        batch.with_columns(advantages=torch.zeros(4))
