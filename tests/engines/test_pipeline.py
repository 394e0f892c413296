"""The order of a pipeline's work, and what happens to an update when a rank of one fails."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from engine_builders import Place, cut, load_state, make_batch, make_twin, run_places, spec_of

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.objectives import LikelihoodObjective
from nereus.algorithms.types import OutputKind, Outputs
from nereus.engines.infer import score
from nereus.engines.pipeline import MicroBatch, Pipeline
from nereus.engines.train import AdamW, Trainer
from nereus.engines.transformer import Attend, Rope, StageModel
from nereus.errors import UpdateAborted
from nereus.plan import Layout
from nereus.shards.state import RankState, StateKind

OPTIMIZER = AdamW(learning_rate=lambda updates: 1e-2)


class RecordingModel(StageModel):
    """A stage that writes down when it computes a micro-batch forward and backward."""

    def body(self, hidden: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        number = sum(event.startswith("F") for event in self.events)
        self.events.append(f"F{number}")
        output = super().body(hidden, rope, attend)
        output.register_hook(lambda grad: self.events.append(f"B{number}"))  # type: ignore[no-untyped-call]
        return output

    @property
    def events(self) -> list[str]:
        found: list[str] = self.__dict__.setdefault("_events", [])
        return found


def test_stages_alternate_between_forward_and_backward_once_the_pipeline_is_full() -> None:
    twin = make_twin("llama")
    spec, batch = spec_of(twin), make_batch((3, 4, 5, 6), vocab=101)

    def run(place: Place) -> list[str]:
        state = load_state(spec, place.layout, place.rank, twin.state_dict(), dtype=torch.float64, trains=True)
        model = RecordingModel(state, tp=place.groups.tp, grads=torch.zeros_like(state.flats[StateKind.PARAM]))
        micros = [MicroBatch.of(piece, model) for piece in batch.micro_batches(1)]
        Pipeline(model, place.groups.pp).forward_backward(micros, lambda hidden, _: hidden.square().sum())
        return model.events

    (stages,) = run_places(spec, Layout(pp=3), run)
    assert stages == [
        ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"],
        ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
        ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]


@pytest.mark.parametrize("num_samples", [0, 1, 3, 40])
def test_forward_tasks_keep_the_order_of_the_share_for_any_number_of_micro_batches(num_samples: int) -> None:
    twin = make_twin("qwen2", num_hidden_layers=3)
    spec, batch = spec_of(twin), make_batch([1 + i % 7 for i in range(num_samples)], vocab=101)

    def run(place: Place, micro_batch: int = 1) -> torch.Tensor | None:
        state = load_state(spec, place.layout, place.rank, twin.state_dict(), dtype=torch.float64, trains=False)
        model = StageModel(state, tp=place.groups.tp)
        pipeline = Pipeline(model, place.groups.pp)
        return score(model, pipeline, batch, OutputKind.LOGPROBS, micro_batch=micro_batch)

    ((whole,),) = run_places(spec, Layout(), lambda place: run(place, micro_batch=64))
    ((*others, last),) = run_places(spec, Layout(pp=3), run)
    assert others == [None, None]
    torch.testing.assert_close(last, whole, rtol=0, atol=1e-12)


@dataclasses.dataclass(frozen=True)
class FailsOn(Objective):
    """The likelihood, but the sample with this place in the global order raises."""

    inner: LikelihoodObjective
    prompt_index: int

    @property
    def output(self) -> OutputKind:
        return self.inner.output

    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.prompt_index in micro.prompt_index.tolist():
            raise ValueError("no such label")
        return self.inner(outputs, micro)


def with_bad_token(batch: RolloutBatch) -> RolloutBatch:
    """The batch with a token that the vocabulary lacks in its last sample."""
    tokens = batch.tokens.clone()
    tokens[-1] = 10_000
    return batch.with_columns(tokens=tokens)


def bitwise(state: RankState) -> dict[StateKind, torch.Tensor]:
    return {kind: flat.clone() for kind, flat in state.flats.items()}


FAILURES: dict[str, tuple[Layout, int, bool]] = {
    "the objective of one unit of two": (Layout(), 2, False),
    "the objective, after a stage": (Layout(pp=2), 1, False),
    "the objective, one unit of two, on tp and pp": (Layout(tp=2, pp=2), 2, False),
    "the first stage of one unit of two": (Layout(pp=2), 2, True),
}


@pytest.mark.parametrize(("layout", "dp", "bad_token"), FAILURES.values(), ids=FAILURES.keys())
def test_every_rank_aborts_an_update_in_which_one_failed_and_can_do_it_again(
    layout: Layout, dp: int, bad_token: bool
) -> None:
    twin = make_twin("qwen3", tie_word_embeddings=True)
    spec, batch = spec_of(twin), make_batch((9, 3, 12, 5), vocab=101)
    objective = LikelihoodObjective(counts=batch.counts)
    states = {
        (unit, rank): load_state(spec, layout, rank, twin.state_dict(), dtype=torch.float64, trains=True)
        for unit in range(dp)
        for rank in range(layout.num_ranks)
    }

    def update(batch: RolloutBatch, objective: Objective) -> Callable[[Place], bool]:
        def run(place: Place) -> bool:
            trainer = Trainer(states[place.unit, place.rank], place.groups, OPTIMIZER)
            return trainer.update(batch.shares(dp)[place.unit], objective, micro_batch=1).applied

        return run

    def aborted(place: Place) -> str:
        failing = FailsOn(objective, prompt_index=0)
        run = update(with_bad_token(batch), objective) if bad_token else update(batch, failing)
        with pytest.raises(UpdateAborted) as caught:
            run(place)
        return str(caught.value)

    run_places(spec, layout, update(batch, objective), dp=dp)
    before = {place: bitwise(state) for place, state in states.items()}
    counters = {place: state.counters for place, state in states.items()}
    reasons = [reason for unit in run_places(spec, layout, aborted, dp=dp, timeout_s=1.0) for reason in unit]
    assert any("out of range" in reason if bad_token else "no such label" in reason for reason in reasons), reasons
    for place, state in states.items():
        assert state.counters == counters[place]
        assert all(torch.equal(state.flats[kind], flat) for kind, flat in before[place].items())

    assert all(run_places(spec, layout, update(batch, objective), dp=dp)[0])
    ((expected,),) = run_places(spec, Layout(), two_updates(twin.state_dict(), batch, objective))
    for state in states.values():
        for shard in state.shards:
            whole = expected.view(shard.param.name)[cut(shard)]
            torch.testing.assert_close(state.view(shard.param.name), whole, rtol=1e-9, atol=1e-12)


def two_updates(
    weights: dict[str, torch.Tensor], batch: RolloutBatch, objective: Objective
) -> Callable[[Place], RankState]:
    """What a single rank holds after two updates with no failure between them."""

    def run(place: Place) -> RankState:
        state = load_state(place.spec, place.layout, place.rank, weights, dtype=torch.float64, trains=True)
        trainer = Trainer(state, place.groups, OPTIMIZER)
        for _ in range(2):
            trainer.update(batch, objective, micro_batch=4)
        return state

    return run
