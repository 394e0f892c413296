"""Logits, values, scores and token statistics of every layout against `transformers`."""

from typing import Any

import pytest
import torch
from engine_builders import Place, load_state, make_batch, make_twin, run_places, sequences, spec_of
from transformers import PreTrainedModel

from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import OutputKind
from nereus.engines.infer import compute_outputs, score
from nereus.engines.pipeline import MicroBatch, Pipeline
from nereus.engines.transformer import StageModel
from nereus.errors import ModelError
from nereus.model import Head
from nereus.plan import Layout

LENGTHS = (23, 1, 40, 17, 0)


def unit_outputs(twin: PreTrainedModel, batch: RolloutBatch, layout: Layout) -> torch.Tensor:
    """Logits [tokens, V], or values [tokens], of a unit of the twin's weights, put together from its ranks' parts."""
    spec, weights = spec_of(twin), twin.state_dict()

    def run(place: Place) -> list[torch.Tensor]:
        state = load_state(spec, layout, place.rank, weights, dtype=torch.float32, trains=False)
        model = StageModel(state, tp=place.groups.tp)
        head = model.logits if spec.head is Head.LM else model.values
        micros = [MicroBatch.of(piece, model) for piece in batch.micro_batches(2)]
        return Pipeline(model, place.groups.pp).forward(micros, lambda hidden, _: head(hidden))

    (ranks,) = run_places(spec, layout, run)
    assert all(not parts for parts in ranks[: -layout.tp]), "only the last stage has outputs"
    columns = [torch.cat(parts) for parts in ranks[-layout.tp :]]
    if spec.head is Head.LM:
        return torch.cat(columns, -1)
    for column in columns[1:]:
        torch.testing.assert_close(column, columns[0], rtol=0, atol=0)
    return columns[0]


@torch.no_grad()
def twin_logits(twin: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    return torch.cat([twin(tokens.unsqueeze(0)).logits[0] for tokens in sequences(batch)])


def largest_error(twin: PreTrainedModel, layout: Layout) -> float:
    batch = make_batch(LENGTHS, vocab=twin.config.vocab_size)
    return float((unit_outputs(twin, batch, layout) - twin_logits(twin, batch)).abs().max())


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_equal_those_of_transformers(family: str, tp: int, pp: int) -> None:
    for tied in (False, True):
        error = largest_error(make_twin(family, tie_word_embeddings=tied), Layout(tp=tp, pp=pp))
        print(f"{family} tied={tied} t{tp}p{pp}: {error:.2g}")
        assert error < 1e-4


HEADS_28 = {"num_attention_heads": 28, "head_dim": 4, "hidden_size": 56}
AWKWARD: list[tuple[str, Layout, dict[str, Any]]] = [
    *[(f"28 heads over tp {tp}", Layout(tp=tp), {**HEADS_28, "num_key_value_heads": 4}) for tp in (1, 2, 4, 7, 14)],
    ("one KV head on every rank", Layout(tp=4), {"num_key_value_heads": 1}),
    ("a KV head for each query head", Layout(tp=2, pp=2), {"num_key_value_heads": 8}),
    ("5 layers over 3 stages", Layout(tp=1, pp=3), {}),
    ("4 layers on 4 stages", Layout(tp=2, pp=4), {"num_hidden_layers": 4}),
    ("fewer vocabulary rows than ranks", Layout(tp=4, pp=2), {"vocab_size": 3}),
    ("103 feed-forward channels over 4 ranks", Layout(tp=4), {"intermediate_size": 103}),
]


@pytest.mark.parametrize(("layout", "sizes"), [case[1:] for case in AWKWARD], ids=[case[0] for case in AWKWARD])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_equal_for_shapes_that_do_not_divide(family: str, layout: Layout, sizes: dict[str, Any]) -> None:
    tied = family == "qwen3"
    error = largest_error(make_twin(family, tie_word_embeddings=tied, **sizes), layout)
    print(f"{family} {layout} {sizes}: {error:.2g}")
    assert error < 1e-4


@pytest.mark.parametrize("first", [0, 5, 28])
def test_a_qwen_window_on_all_layers_or_none_equals_that_of_transformers(first: int) -> None:
    window: dict[str, Any] = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": first}
    assert largest_error(make_twin("qwen2", **window), Layout(tp=2)) < 1e-4


def test_a_window_on_some_layers_only_is_refused() -> None:
    twin = make_twin("qwen3", sliding_window=16, use_sliding_window=True, max_window_layers=2)
    with pytest.raises(ModelError, match="3 of 5 layers"):
        spec_of(twin)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(tp=4)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_scalar_head_gives_the_scores_of_transformers(family: str, layout: Layout) -> None:
    twin = make_twin(family, head=Head.SCORE)
    batch = make_batch((23, 1, 40, 17), vocab=101)
    spec, weights = spec_of(twin), twin.state_dict()

    def run(place: Place) -> list[torch.Tensor | None]:
        state = load_state(spec, layout, place.rank, weights, dtype=torch.float32, trains=False)
        model = StageModel(state, tp=place.groups.tp)
        pipeline = Pipeline(model, place.groups.pp)
        return [score(model, pipeline, batch, kind, micro_batch=3) for kind in (OutputKind.SCORES, OutputKind.VALUES)]

    (ranks,) = run_places(spec, layout, run)
    assert all(outputs == [None, None] for outputs in ranks[: -layout.tp])
    scores, values = twin_scores(twin, batch)
    for outputs in ranks[-layout.tp :]:
        torch.testing.assert_close(outputs[0], scores, rtol=0, atol=1e-4)
        torch.testing.assert_close(outputs[1], values, rtol=0, atol=1e-4)


@torch.no_grad()
def twin_scores(twin: PreTrainedModel, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [N] as sequence classification pools them, and the head at every predicting position [T]."""
    scores, values = [], []
    for tokens, length in zip(sequences(batch), batch.response_lengths.tolist(), strict=True):
        tokens = tokens.unsqueeze(0)
        scores.append(twin(tokens).logits[0, 0])
        hidden = twin.model(tokens).last_hidden_state[0]
        values.append(twin.score(hidden)[:, 0][-length - 1 : -1])
    return torch.stack(scores), torch.cat(values)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=4, pp=2), Layout(pp=3)], ids=str)
@pytest.mark.parametrize(("vocab", "temperature"), [(3, 1.0), (101, 1.0), (101, 0.7)])
def test_token_statistics_equal_those_of_the_whole_row_of_logits(
    layout: Layout, vocab: int, temperature: float
) -> None:
    twin = make_twin("qwen2", vocab_size=vocab, tie_word_embeddings=True)
    batch = make_batch(LENGTHS, vocab=vocab)
    spec, weights = spec_of(twin), twin.state_dict()

    def run(place: Place) -> list[tuple[torch.Tensor, torch.Tensor]]:
        state = load_state(spec, layout, place.rank, weights, dtype=torch.float32, trains=False)
        model = StageModel(state, tp=place.groups.tp)

        def head(hidden: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = compute_outputs(
                model, hidden, micro.batch, OutputKind.LOGPROBS, with_entropy=True, temperature=temperature
            )
            assert outputs.logprobs is not None and outputs.entropy is not None
            return outputs.logprobs, outputs.entropy

        micros = [MicroBatch.of(piece, model) for piece in batch.micro_batches(1)]
        return Pipeline(model, place.groups.pp).forward(micros, head)

    (ranks,) = run_places(spec, layout, run)
    logprobs, entropies = twin_statistics(twin, batch, temperature)
    for outputs in ranks[-layout.tp :]:
        for part, whole in ((0, logprobs), (1, entropies)):
            found = torch.cat([output[part] for output in outputs])
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)


def twin_statistics(
    twin: PreTrainedModel, batch: RolloutBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [T] of the response tokens from the full softmax."""
    logits = torch.split(twin_logits(twin, batch) / temperature, batch.sequence_lengths.tolist())
    picked, entropies = [], []
    for tokens, rows, length in zip(sequences(batch), logits, batch.response_lengths.tolist(), strict=True):
        logprobs = rows.log_softmax(-1)[len(tokens) - length - 1 : -1]
        picked.append(logprobs.gather(-1, tokens[len(tokens) - length :].unsqueeze(-1)).squeeze(-1))
        entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.cat(picked), torch.cat(entropies)
