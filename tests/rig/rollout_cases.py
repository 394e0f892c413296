"""Small rollout batches with every column filled, for the tests of the algorithms."""

import random

import torch

from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import Sample

VOCABULARY = 11


def ragged_batch(response_lengths: list[int], *, seed: int = 0, fully_masked: tuple[int, ...] = ()) -> RolloutBatch:
    """Random float64 columns; the samples in fully_masked have no token that counts and NaN in their columns."""
    rng = random.Random(seed)
    batch = RolloutBatch.from_samples(
        Sample(
            prompt_index=i,
            group_index=0,
            prompt_tokens=tuple(rng.randrange(VOCABULARY) for _ in range(1 + i % 4)),
            response_tokens=tuple(rng.randrange(VOCABULARY) for _ in range(length)),
            finished=i % 3 != 0,
        )
        for i, length in enumerate(response_lengths)
    )
    generator = torch.Generator().manual_seed(seed)
    mask = ~torch.isin(batch.sample_of_token, torch.tensor(fully_masked, dtype=torch.int64))

    def column(scale: float, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(batch.num_response_tokens, generator=generator, dtype=torch.float64) * scale + shift
        return torch.where(mask, values, torch.nan)

    return batch.with_columns(
        response_mask=mask,
        scores=torch.randint(0, 2, (batch.num_samples,), generator=generator).to(torch.float64),
        old_logprobs=column(0.7, -2.4),
        reference_logprobs=column(0.7, -2.4),
        values=column(0.6),
        advantages=column(1.0),
        returns=column(0.9),
    )


def partly_masked(batch: RolloutBatch, *, seed: int = 0) -> RolloutBatch:
    """The batch with about a third of its tokens masked."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch.num_response_tokens, generator=generator) < 0.67
    return batch.with_columns(response_mask=batch.response_mask & kept)


def rows_of(column: torch.Tensor, batch: RolloutBatch) -> list[list[float]]:
    """A response column as one list a sample."""
    return [row.tolist() for row in torch.split(column, batch.response_lengths.tolist())]
