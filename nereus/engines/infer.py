"""What the last pipeline stage computes from hidden states (log-probabilities, values, scores); forward-only tasks."""

from collections.abc import Sequence

import torch

from nereus.algorithms.buffer import RolloutBatch, gather_ragged
from nereus.algorithms.types import OutputKind, Outputs
from nereus.engines.parallel import token_statistics
from nereus.engines.pipeline import MicroBatch, Pipeline
from nereus.engines.transformer import StageModel


def compute_outputs(
    model: StageModel,
    hidden: torch.Tensor,
    batch: RolloutBatch,
    kind: OutputKind,
    *,
    with_entropy: bool = False,
    temperature: float = 1.0,
) -> Outputs:
    """The asked outputs from last-stage hidden states [tokens, H] of a micro-batch; logits exist for its rows only.

    Logits are divided by `temperature`, so log-probabilities are those of the distribution that was sampled from.
    """
    rows = predicting_rows(batch, kind)
    picked = hidden.index_select(0, rows)
    if kind is OutputKind.LOGPROBS:
        logprobs, entropy = token_statistics(
            model.logits(picked) / temperature if temperature != 1.0 else model.logits(picked),
            batch.tokens[rows + 1],
            first_row=model.first_row,
            group=model.tp,
            with_entropy=with_entropy,
        )
        return Outputs(logprobs=logprobs, entropy=entropy if with_entropy else None)
    values = model.values(picked)
    return Outputs(values=values) if kind is OutputKind.VALUES else Outputs(scores=values)


def predicting_rows(batch: RolloutBatch, kind: OutputKind) -> torch.Tensor:
    """Packed rows the head reads: those that predict response tokens [T], or each sequence's last token [N]."""
    ends = batch.sequence_lengths.cumsum(0)
    if kind is OutputKind.SCORES:
        return ends - 1
    starts = ends - batch.response_lengths - 1
    counts = batch.response_lengths
    before = counts.cumsum(0) - counts
    place = torch.arange(batch.num_response_tokens, device=counts.device)
    return place + (starts - before).repeat_interleave(counts)


def by_length(batch: RolloutBatch, max_samples: int) -> list[list[int]]:
    """Samples cut into micro-batches of like length, longest first, so that padding in attention stays small."""
    order = sorted(range(batch.num_samples), key=lambda i: (-int(batch.sequence_lengths[i]), i))
    count = -(-len(order) // max_samples)
    bounds = [len(order) * i // count for i in range(count + 1)] if count else [0]
    return [order[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def score(
    model: StageModel,
    pipeline: Pipeline,
    batch: RolloutBatch,
    kind: OutputKind,
    *,
    micro_batch: int,
    temperature: float = 1.0,
) -> torch.Tensor | None:
    """Forward-only task over a unit's share: [T] or [N] in the share's order on the last stage, None elsewhere."""
    pieces = by_length(batch, micro_batch)

    def head(hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        outputs = compute_outputs(model, hidden, micro.batch, kind, temperature=temperature)
        result = {
            OutputKind.LOGPROBS: outputs.logprobs,
            OutputKind.VALUES: outputs.values,
            OutputKind.SCORES: outputs.scores,
        }[kind]
        assert result is not None
        return result

    results = pipeline.forward([MicroBatch.of(batch.select(piece), model) for piece in pieces], head)
    if not model.is_last:
        return None
    return _in_order(batch, pieces, results, kind)


def _in_order(
    batch: RolloutBatch, pieces: Sequence[Sequence[int]], results: Sequence[torch.Tensor], kind: OutputKind
) -> torch.Tensor:
    """Undo the cut by length."""
    if not results:
        return torch.zeros(0, device=batch.tokens.device)
    joined = torch.cat(list(results))
    order = torch.tensor([i for piece in pieces for i in piece], dtype=torch.int64, device=joined.device)
    index = order if kind is OutputKind.SCORES else gather_ragged(batch.response_lengths, order)
    return torch.empty_like(joined).index_copy(0, index, joined)
