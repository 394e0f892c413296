"""One batch gives the same loss and gradients whatever the plan and the micro-batch: global sums over global counts."""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_builders import (
    Errors,
    Update,
    engine_update,
    errors,
    in_float64,
    make_batch,
    make_twin,
    spec_of,
    twin_update,
)

from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.losses import Aggregation
from nereus.algorithms.objectives import PolicyObjective
from nereus.engines.train import AdamW
from nereus.plan import Layout

DP, MICRO_BATCH, TP, PP = (1, 2, 3, 4, 6, 7), (1, 2, 4), (1, 2), (1, 2)
AGGREGATIONS = tuple(Aggregation)
OPTIMIZER = AdamW(learning_rate=lambda updates: 1e-3, max_norm=float("inf"))
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of the product of the factors, chosen greedily, in which each pair of values of two factors occurs."""

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(row), 2))

    product = list(itertools.product(*factors))
    left = set().union(*map(pairs, product))
    rows = []
    while left:
        rows.append(max(product, key=lambda row: len(pairs(row) & left)))
        left -= pairs(rows[-1])
    return rows


def batch_of(lengths: Sequence[int]) -> RolloutBatch:
    """Samples with these response lengths in mixed order, one more that is fully masked, and some masked tokens."""
    order = [*lengths, 40]
    random.Random(0).shuffle(order)
    batch = make_batch(order, vocab=SIZES["vocab_size"])
    mask = torch.rand(batch.num_response_tokens, generator=torch.Generator().manual_seed(0)) < 0.9
    mask &= batch.sample_of_token != order.index(40)
    mask |= batch.response_lengths[batch.sample_of_token] == 1
    return batch.with_columns(response_mask=mask)


@functools.cache
def expected(lengths: tuple[int, ...], aggregation: Aggregation) -> Update:
    """Loss and gradients of the batch from one whole model, sample by sample."""
    batch = batch_of(lengths)
    twin = in_float64(make_twin("qwen3", **SIZES))
    return twin_update(twin, batch, objective(batch, aggregation), OPTIMIZER)


def objective(batch: RolloutBatch, aggregation: Aggregation) -> PolicyObjective:
    return PolicyObjective(counts=batch.counts, aggregation=aggregation, entropy_coeff=0.01, kl_loss_coef=0.1)


def compare(lengths: tuple[int, ...], dp: int, micro_batch: int, tp: int, pp: int, aggregation: Aggregation) -> Errors:
    batch, twin = batch_of(lengths), make_twin("qwen3", **SIZES)
    units = engine_update(
        spec_of(twin),
        twin.state_dict(),
        batch,
        objective(batch, aggregation),
        OPTIMIZER,
        layout=Layout(tp=tp, pp=pp),
        dp=dp,
        micro_batch=micro_batch,
    )
    found = errors(units, expected(lengths, aggregation))
    print(f"d{dp}t{tp}p{pp} micro-batch {micro_batch} {aggregation}: {found}")
    return found


@pytest.mark.parametrize(
    ("dp", "micro_batch", "tp", "pp", "aggregation"), pairwise(DP, MICRO_BATCH, TP, PP, AGGREGATIONS)
)
def test_loss_and_gradients_do_not_depend_on_the_plan(
    dp: int, micro_batch: int, tp: int, pp: int, aggregation: Aggregation
) -> None:
    found = compare(tuple(range(1, 98, 4)), dp, micro_batch, tp, pp, aggregation)
    assert found.loss < 1e-9 and found.grads < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
@pytest.mark.parametrize("micro_batch", MICRO_BATCH)
@pytest.mark.parametrize(("tp", "pp"), list(itertools.product(TP, PP)))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradients_do_not_depend_on_the_plan_for_all_lengths_to_97(
    dp: int, micro_batch: int, tp: int, pp: int, aggregation: Aggregation
) -> None:
    found = compare(tuple(range(1, 98)), dp, micro_batch, tp, pp, aggregation)
    assert found.loss < 1e-9 and found.grads < 1e-9


def test_the_chosen_combinations_hold_each_pair_of_values() -> None:
    factors = (DP, MICRO_BATCH, TP, PP, AGGREGATIONS)
    rows = pairwise(*factors)
    for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
