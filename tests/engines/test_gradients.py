"""Gradients, their norm and updated parameters of every layout against autograd over one whole model in float64."""

import dataclasses
from typing import Any

import pytest
import torch
from engine_builders import engine_update, errors, in_float64, make_batch, make_twin, spec_of, twin_update

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.objectives import BernoulliRewardObjective, PolicyObjective, ValueObjective
from nereus.engines.train import AdamW
from nereus.model import Head
from nereus.plan import Layout, Recompute

FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
LENGTHS = (9, 21, 1, 14, 0, 30, 5)
OPTIMIZER = AdamW(learning_rate=lambda updates: 1e-2, weight_decay=0.01, max_norm=0.05)
HEADS_28 = {
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "hidden_size": 56,
    "num_hidden_layers": 2,
}
TIED = {"tie_word_embeddings": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the way it is split."""

    name: str
    family: str
    layout: Layout
    dp: int = 1
    micro_batch: int = 2
    recompute: Recompute = Recompute.NONE
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = [
    Case("one process", "llama", Layout(), micro_batch=7, sizes=TIED),
    Case("llama, replicated KV heads", "llama", Layout(tp=4), dp=2),
    Case("llama, tied over uneven stages", "llama", Layout(tp=2, pp=3), micro_batch=1, recompute=FULL, sizes=TIED),
    Case("llama, 28 heads over 7", "llama", Layout(tp=7), sizes=HEADS_28),
    Case("qwen2, replicated KV bias", "qwen2", Layout(tp=4, pp=2), micro_batch=1, recompute=SELECTIVE),
    Case("qwen2, three units", "qwen2", Layout(pp=2), dp=3, recompute=FULL, sizes=TIED),
    Case("qwen3, q/k norm", "qwen3", Layout(tp=2, pp=2), dp=2, micro_batch=1, recompute=SELECTIVE, sizes=TIED),
    Case("qwen3, 28 heads over 7", "qwen3", Layout(tp=7), recompute=FULL, sizes={**HEADS_28, **TIED}),
    Case("qwen3, 28 heads over 14", "qwen3", Layout(tp=14), sizes=HEADS_28),
    Case("qwen3, fewer vocabulary rows than ranks", "qwen3", Layout(tp=4, pp=2), sizes={"vocab_size": 3, **TIED}),
    Case("mistral, window", "mistral", Layout(tp=2), dp=3, recompute=FULL),
    Case("mistral, a stage a layer", "mistral", Layout(pp=5), micro_batch=1, sizes=TIED),
    Case("mistral, one KV head, uneven channels", "mistral", Layout(tp=4), sizes={"num_key_value_heads": 1}),
]


def compare(case: Case, objective: Objective, batch: RolloutBatch, *, head: Head = Head.LM) -> None:
    """Two clipped updates of the case's units against the twin's."""
    twin = make_twin(case.family, head=head, **case.sizes)
    spec = spec_of(twin)
    weights = {name: weight.clone() for name, weight in twin.state_dict().items()}
    units = engine_update(
        spec,
        weights,
        batch,
        objective,
        OPTIMIZER,
        layout=case.layout,
        dp=case.dp,
        micro_batch=case.micro_batch,
        recompute=case.recompute,
        num_updates=2,
    )
    expected = twin_update(in_float64(twin), batch, objective, OPTIMIZER, num_updates=2)
    assert expected.grad_norm > OPTIMIZER.max_norm, "the case must clip"
    found = errors(units, expected)
    print(f"{case.name}: {found}")
    assert max(dataclasses.astuple(found)) < 1e-9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_clipped_policy_update_equals_that_of_one_whole_model(case: Case) -> None:
    batch = make_batch(LENGTHS, vocab=case.sizes.get("vocab_size", 101))
    objective = PolicyObjective(counts=batch.counts, entropy_coeff=0.1, kl_loss_coef=0.05)
    compare(case, objective, batch)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", "llama", Layout(tp=4), dp=2),
        Case("qwen2", "qwen2", Layout(tp=2, pp=2), micro_batch=1, recompute=FULL),
        Case("qwen3", "qwen3", Layout(tp=7), sizes=HEADS_28),
        Case("mistral", "mistral", Layout(pp=3), dp=2),
    ],
    ids=lambda case: case.name,
)
def test_a_clipped_critic_update_equals_that_of_one_whole_model(case: Case) -> None:
    batch = make_batch(LENGTHS, vocab=101)
    compare(case, ValueObjective(counts=batch.counts), batch, head=Head.SCORE)


def test_a_clipped_reward_model_update_equals_that_of_one_whole_model() -> None:
    batch = make_batch((9, 21, 1, 14, 30), vocab=101)
    batch = batch.with_columns(scores=torch.tensor([1.0, 0, 0, 1, 1], dtype=torch.float64))
    case = Case("reward", "qwen2", Layout(tp=2, pp=2), dp=2)
    compare(case, BernoulliRewardObjective(counts=batch.counts), batch, head=Head.SCORE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [SELECTIVE, FULL])
def test_recomputation_changes_no_bit_of_an_update(recompute: Recompute, dtype: torch.dtype) -> None:
    twin = make_twin("qwen2")
    batch = make_batch(LENGTHS, vocab=101)
    objective = PolicyObjective(counts=batch.counts, entropy_coeff=0.1)
    plain, again = (
        engine_update(
            spec_of(twin),
            dict(twin.state_dict()),
            batch,
            objective,
            OPTIMIZER,
            layout=Layout(tp=2, pp=2),
            num_updates=2,
            recompute=how,
            dtype=dtype,
        )
        for how in (Recompute.NONE, recompute)
    )
    for kept, computed in zip(plain[0], again[0], strict=True):
        assert torch.equal(kept.trainer.grads, computed.trainer.grads)
        for kind, flat in kept.trainer.state.flats.items():
            assert torch.equal(flat, computed.trainer.state.flats[kind])
