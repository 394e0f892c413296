"""A rollout engine that computes nothing: its tokens are a hash. For tests of what calls engines."""

from collections.abc import Iterator, Sequence

from nereus.comm.groups import Group
from nereus.engines.rollout import Completion, Footprint, Request, RolloutEngine
from nereus.engines.sampling import SamplingParams, sequence_key
from nereus.engines.transformer import StageModel
from nereus.shards.kv_blocks import block_bytes, blocks_of, most_blocks
from nereus.shards.state import StateKind


class FakeEngine(RolloutEngine):
    """Every token is a hash of the sampling seed, place, index, position, the prompt and the sum of the rank's weights.

    Sequences run one after the other, so its cache never has more blocks than one sequence. It talks to no other rank,
    and all ranks agree only where they hold the same weights.
    """

    def __init__(
        self,
        model: StageModel,
        *,
        tp: Group,
        pp: Group,
        max_slots: int,
        max_length: int,
        cache_bytes: int | None = None,
    ):
        super().__init__(model, tp=tp, pp=pp, max_slots=max_slots, max_length=max_length, cache_bytes=cache_bytes)
        spec, layout = model.spec, model.state.layout
        value_bytes = model.state.flats[StateKind.PARAM].element_size()
        most_blocks(spec, layout, value_bytes, sequences=max_slots, longest=max_length, cache_bytes=cache_bytes)
        self._block_bytes = block_bytes(spec, layout, value_bytes)
        self._weights: int | None = None
        self._held_bytes = self._peak_bytes = 0

    @property
    def footprint(self) -> Footprint:
        return Footprint(self._held_bytes, self._peak_bytes)

    def load(self) -> None:
        self._weights = hash(float(self._model.state.flats[StateKind.PARAM].double().sum()))

    def release(self) -> None:
        self._weights, self._held_bytes = None, 0

    def stream(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Completion]:
        assert self._weights is not None, "load comes first"
        self._check(requests, params)
        for request in requests:
            tokens = self._tokens(request, params)
            self._held_bytes = blocks_of(len(request.tokens) + len(tokens)) * self._block_bytes
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
            yield Completion(request.place, request.index, tokens, tokens[-1] in params.stop_ids)

    def _tokens(self, request: Request, params: SamplingParams) -> tuple[int, ...]:
        key = hash((self._weights, *request.tokens))
        if not params.is_greedy:
            key ^= sequence_key(params.seed, request.place, request.index)
        new: list[int] = []
        while len(new) < params.max_new_tokens and not (new and new[-1] in params.stop_ids):
            new.append(hash((key, len(new))) % self._model.spec.vocab)
        return tuple(new)
