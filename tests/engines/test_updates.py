"""Updates that must change nothing, and updates in bf16 with fp32 masters."""

import dataclasses

import pytest
import torch
from engine_builders import (
    Place,
    RankUpdate,
    engine_update,
    load_state,
    make_batch,
    make_twin,
    run_places,
    spec_of,
)

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.objectives import LikelihoodObjective
from nereus.algorithms.types import OutputKind, Outputs
from nereus.engines.train import AdamW, Trainer
from nereus.plan import Layout
from nereus.shards.state import Counters, StateKind


@dataclasses.dataclass(frozen=True)
class Scaled(Objective):
    """The likelihood times a factor."""

    inner: LikelihoodObjective
    factor: float

    @property
    def output(self) -> OutputKind:
        return self.inner.output

    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = self.inner(outputs, micro)
        return loss * self.factor, metrics


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_an_update_whose_norm_is_not_finite_changes_nothing_and_says_so(factor: float) -> None:
    twin = make_twin("llama", tie_word_embeddings=True)
    batch = make_batch((4, 7, 2, 9), vocab=101)
    objective = LikelihoodObjective(counts=batch.counts)

    def run(place: Place) -> None:
        state = load_state(place.spec, place.layout, place.rank, twin.state_dict(), dtype=torch.float32, trains=True)
        trainer = Trainer(state, place.groups, AdamW(learning_rate=lambda updates: 1e-2))
        share = batch.shares(2)[place.unit]
        assert trainer.update(share, objective, micro_batch=1).applied
        before = {kind: flat.clone() for kind, flat in state.flats.items()}
        # Only unit 0 meets the factor: the others learn of it from the vote.
        scaled = Scaled(objective, factor if place.unit == 0 else 1.0)
        result = trainer.update(share, scaled, micro_batch=1)
        assert not result.applied and not torch.tensor(result.grad_norm).isfinite()
        assert state.counters == Counters(updates=1, version=1)
        assert all(torch.equal(state.flats[kind], flat) for kind, flat in before.items())
        assert trainer.update(share, objective, micro_batch=1).applied, "the groups are still in step"

    run_places(spec_of(twin), Layout(tp=2, pp=2), run, dp=2)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_bf16_updates_with_fp32_masters_track_those_in_fp32(layout: Layout) -> None:
    """Each update moves a weight by about 1e-4, far less than bf16 resolves: without masters nothing would move."""
    twin = make_twin("qwen3", tie_word_embeddings=True, num_hidden_layers=2)
    batch = make_batch((20, 31, 8, 17), vocab=101)
    objective = LikelihoodObjective(counts=batch.counts)
    optimizer = AdamW(learning_rate=lambda updates: 1e-4)
    weights = {name: weight.bfloat16().float() for name, weight in twin.state_dict().items()}

    def train(dtype: torch.dtype) -> list[RankUpdate]:
        return engine_update(
            spec_of(twin), weights, batch, objective, optimizer, layout=layout, num_updates=10, dtype=dtype
        )[0]

    for half, full in zip(train(torch.bfloat16), train(torch.float32), strict=True):
        state, rank = half.trainer.state, half.trainer.state.rank
        masters, wide = state.flats[StateKind.MASTER], full.trainer.state.flats[StateKind.PARAM]
        start = load_state(state.spec, layout, rank, weights, dtype=torch.float32, trains=False).flats[StateKind.PARAM]
        assert torch.equal(state.flats[StateKind.PARAM], masters.bfloat16())
        assert half.trainer.grads.dtype == state.flats[StateKind.EXP_AVG].dtype == torch.float32
        missed = float((masters - wide).norm() / (wide - start).norm())
        print(f"{layout} rank {rank}: missed {missed:.3f} of the way")
        assert missed < 0.1
        assert half.result.grad_norm == pytest.approx(full.result.grad_norm, rel=0.02)


def test_gradients_of_bf16_weights_add_up_in_fp32() -> None:
    """300 equal micro-batches: a sum in bf16 would stop growing after 256 of them."""
    twin = make_twin(
        "llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=11
    )
    one = make_batch((6,), vocab=11)
    many = one.select([0] * 300)
    objective = LikelihoodObjective(counts=one.counts)
    optimizer = AdamW(learning_rate=lambda updates: 0.0, max_norm=float("inf"))

    def grads(batch: RolloutBatch) -> torch.Tensor:
        ((only,),) = engine_update(
            spec_of(twin), twin.state_dict(), batch, objective, optimizer,
            layout=Layout(), micro_batch=1, dtype=torch.bfloat16,
        )  # fmt: skip
        return only.trainer.grads

    torch.testing.assert_close(grads(many), 300 * grads(one), rtol=1e-4, atol=1e-5)
