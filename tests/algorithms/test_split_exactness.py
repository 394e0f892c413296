"""Loss, gradient and metrics are those of the whole batch, however it is shared out and cut up."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from rollout_cases import VOCABULARY, ragged_batch

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch, starts
from nereus.algorithms.losses import Aggregation
from nereus.algorithms.objectives import (
    BernoulliRewardObjective,
    LikelihoodObjective,
    PolicyObjective,
    ValueObjective,
)
from nereus.algorithms.types import Outputs

HIDDEN = 5
FULLY_MASKED = 40


class LinearModel:
    """Next-token logits, a value by token and a score by sample, each linear in an embedding of the last token."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
        self.head = torch.randn(HIDDEN, VOCABULARY + 1, generator=generator, dtype=torch.float64)
        for tensor in self.parameters:
            tensor.requires_grad_()

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding, self.head

    def outputs(self, batch: RolloutBatch) -> Outputs:
        hidden = self.embedding[batch.tokens] @ self.head
        ends = batch.sequence_lengths.cumsum(0)
        within = torch.arange(batch.num_response_tokens) - starts(batch.response_lengths)[batch.sample_of_token]
        token_at = (ends - batch.response_lengths)[batch.sample_of_token] + within
        logprobs = hidden[token_at - 1, :VOCABULARY].log_softmax(-1)
        return Outputs(
            logprobs=logprobs.gather(1, batch.tokens[token_at, None]).squeeze(1),
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            values=hidden[token_at - 1, VOCABULARY],
            scores=hidden[ends - 1, VOCABULARY],
        )


@dataclasses.dataclass
class Total:
    """Loss, gradients and metrics of one objective, added up over pieces."""

    loss: float = 0.0
    gradients: tuple[torch.Tensor, ...] = ()
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, loss: torch.Tensor, metrics: dict[str, torch.Tensor], parameters: tuple[torch.Tensor, ...]) -> None:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        before = self.gradients or tuple(torch.zeros_like(p) for p in parameters)
        self.gradients = tuple(a + b for a, b in zip(before, gradients, strict=True))
        self.loss += loss.item()
        self.metrics = {name: self.metrics.get(name, 0.0) + value.item() for name, value in metrics.items()}


def run(objectives: Sequence[Objective], pieces: Sequence[RolloutBatch]) -> list[Total]:
    model = LinearModel()
    totals = [Total() for _ in objectives]
    for piece in pieces:
        outputs = model.outputs(piece)
        for total, objective in zip(totals, objectives, strict=True):
            total.add(*objective(outputs, piece), model.parameters)
    return totals


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small lose by being shared out over threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return ragged_batch(list(range(1, 98)), fully_masked=(FULLY_MASKED,))


def objectives(batch: RolloutBatch, aggregation: Aggregation) -> tuple[Objective, ...]:
    counts = batch.counts
    return (
        PolicyObjective(counts=counts, aggregation=aggregation, entropy_coeff=0.01, kl_loss_coef=0.1),
        ValueObjective(counts=counts, aggregation=aggregation),
        LikelihoodObjective(counts=counts, aggregation=aggregation),
        BernoulliRewardObjective(counts=counts),
    )


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_loss_and_gradient_do_not_depend_on_dp_or_micro_batch(
    batch: RolloutBatch, aggregation: Aggregation, micro_batch: int
) -> None:
    of_batch = run(objectives(batch, aggregation), [batch])
    for dp in (1, 2, 3, 4, 6, 7):
        pieces = [micro for share in batch.shares(dp) for micro in share.micro_batches(micro_batch)]
        for total, expected in zip(run(objectives(batch, aggregation), pieces), of_batch, strict=True):
            assert total.loss == pytest.approx(expected.loss, rel=1e-12)
            for gradient, whole in zip(total.gradients, expected.gradients, strict=True):
                torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12 * whole.abs().max().item())
            assert total.metrics == pytest.approx(expected.metrics, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_fully_masked_sample_changes_nothing(batch: RolloutBatch, aggregation: Aggregation) -> None:
    without = batch.select([i for i in range(batch.num_samples) if i != FULLY_MASKED])
    assert objectives(batch, aggregation) == objectives(without, aggregation)
    totals = run(objectives(batch, aggregation), [batch])
    for total, expected in zip(totals, run(objectives(without, aggregation), [without]), strict=True):
        assert total.loss == pytest.approx(expected.loss, rel=1e-12)
        for gradient, of_others in zip(total.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(gradient, of_others, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_MEAN])
def test_counts_of_a_share_in_place_of_the_batch_would_be_noticed(
    batch: RolloutBatch, aggregation: Aggregation
) -> None:
    whole = run([LikelihoodObjective(counts=batch.counts, aggregation=aggregation)], [batch])[0].loss
    averaged = 0.0
    for share in batch.shares(3):
        averaged += run([LikelihoodObjective(counts=share.counts, aggregation=aggregation)], [share])[0].loss / 3
    assert abs(averaged - whole) > 1e-6 * abs(whole)
