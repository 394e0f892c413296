"""Generation on one unit: continuous batching over slots of a key/value cache, under tensor and pipeline parallelism.

Every rank of the unit runs the same loop over the same requests and takes the same decisions, because each learns every
sampled token; only hidden states and tokens travel.

    lane 0:   admit -> launch ---- hidden ----> ... last stage samples ---- tokens ----> collect -> admit -> ...
    lane 1:            admit -> launch ...                (a lane a pipeline stage, so that stages overlap)

In `launch` a stage waits for the hidden states of the stage before it; in `collect` every stage but the last waits for
the last one's tokens. Sends do not wait. A finished sequence frees its slot; the last slot in use moves there.
"""

import collections
import dataclasses
from collections.abc import Sequence

import torch

from nereus.comm.groups import Group, Work
from nereus.engines.cache import CachedAttention, KvCache
from nereus.engines.packing import packed_for_decoding
from nereus.engines.sampling import Sampler, SamplingParams, sequence_key
from nereus.engines.transformer import Packing, Rope, StageModel
from nereus.errors import InputError
from nereus.shards.state import StateKind


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: the prompt's global place, its index in the prompt's group, the prompt's tokens."""

    place: int
    index: int
    tokens: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What a request became. tokens: new tokens, the stop token included; finished: a stop token ended it."""

    place: int
    index: int
    tokens: tuple[int, ...]
    finished: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What one forward pass of a lane computes: a token for each slot in use, then whole prompts of new slots.

    tokens, positions [T]. column, length: where the slots in use write, and how long the longest then is. prompts:
    their packing, cache rows and columns. sampled: which tokens' successors are sampled, None for all.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    num_decode: int
    column: int
    length: int
    prompts: tuple[Packing, torch.Tensor, torch.Tensor] | None
    sampled: torch.Tensor | None


class _Lane:
    """Slots that step together: which sequence each holds and how far it is. Scheduling only, no computation."""

    def __init__(self, cache: KvCache, params: SamplingParams):
        num_slots, device = cache.num_slots, cache.keys.device
        self.cache, self._params = cache, params
        self.requests: list[int] = []  # of each slot in use, its place in the call's list of requests
        self.positions = torch.zeros(num_slots, dtype=torch.int64, device=device)  # of the last token
        self.limits = torch.zeros_like(self.positions)  # position at which a sequence is cut
        self.keys = torch.zeros_like(self.positions)
        self.new_tokens = torch.zeros(num_slots, cache.num_columns, dtype=torch.int64, device=device)
        self._all_slots = torch.arange(num_slots, device=device)
        self._stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        self._num_slots, self._column = num_slots, 0
        self._longest = self._steps_to_limit = 0

    @property
    def num_free(self) -> int:
        return self._num_slots - len(self.requests)

    def next_step(self, admitted: Sequence[tuple[int, Request]]) -> _Step:
        """Place new requests behind the slots in use and say what to compute next."""
        n, length = len(self.requests), self._longest + 1
        slots, positions = self._all_slots[:n], self.positions[:n]
        if n:
            self.cache.open_column(self._column, n)
        else:
            self._column = max(len(request.tokens) for _, request in admitted) - 1
        tokens = self.new_tokens[:n, self._column]
        if not admitted:
            return _Step(tokens, positions, n, self._column, length, None, None)
        new_tokens, prompts = self._place(admitted)
        last = n - 1 + torch.tensor(prompts[0].lengths, device=tokens.device).cumsum(0)
        return _Step(
            tokens=torch.cat((tokens, new_tokens)),
            positions=torch.cat((positions, prompts[0].positions)),
            num_decode=n,
            column=self._column,
            length=length,
            prompts=prompts,
            sampled=torch.cat((slots, last)),
        )

    def _place(
        self, admitted: Sequence[tuple[int, Request]]
    ) -> tuple[torch.Tensor, tuple[Packing, torch.Tensor, torch.Tensor]]:
        """Give new requests the next slots; their tokens [P] and their packing, cache rows and columns."""
        device, first = self.positions.device, len(self.requests)
        packing = Packing.of([len(request.tokens) for _, request in admitted], device)
        tokens = torch.tensor([token for _, request in admitted for token in request.tokens], device=device)
        keys = [sequence_key(self._params.seed, request.place, request.index) for _, request in admitted]
        lengths = torch.tensor(packing.lengths, device=device)
        slots = self._all_slots[first : first + len(admitted)]
        self.keys[slots] = torch.tensor(keys, dtype=torch.int64, device=device)
        self.positions[slots] = lengths - 1
        self.limits[slots] = lengths - 1 + self._params.max_new_tokens
        self.requests += [place for place, _ in admitted]
        self._longest = max(self._longest, packing.longest - 1)
        self._steps_to_limit = min(self._steps_to_limit or self._params.max_new_tokens, self._params.max_new_tokens)
        return tokens, (packing, *self.cache.place(slots, packing, self._column))

    def take(self, tokens: torch.Tensor) -> list[tuple[int, tuple[int, ...], bool]]:
        """Append tokens, one a slot in use; (request, new tokens, stopped) of every sequence that ended."""
        n = len(self.requests)
        positions = self.positions[:n].add_(1)
        self._column = (self._column + 1) % self.cache.num_columns
        self.new_tokens[:n, self._column] = tokens
        self._longest += 1
        self._steps_to_limit -= 1
        if self._steps_to_limit and not self._params.stop_ids:
            return []
        stopped = (tokens.unsqueeze(1) == self._stops).any(1)
        ended = (stopped | (positions >= self.limits[:n])).nonzero().squeeze(1).tolist()
        if not ended:
            return []
        done = [(self.requests[slot], self._tokens_of(slot), bool(stopped[slot])) for slot in ended]
        self._release(ended)
        return done

    def _tokens_of(self, slot: int) -> tuple[int, ...]:
        count = int(self.positions[slot] - self.limits[slot]) + self._params.max_new_tokens
        spans = self.cache.ring(self._column, count)
        return tuple(token for span in spans for token in self.new_tokens[slot, span].tolist())

    def _release(self, ended: list[int]) -> None:
        """Free slots; the last ones in use move into the gaps."""
        kept = len(self.requests) - len(ended)
        targets = [slot for slot in ended if slot < kept]
        gone = set(ended)
        sources = [slot for slot in range(kept, len(self.requests)) if slot not in gone]
        if targets:
            self.cache.move(sources, targets, self.cache.spans(self._column, self._longest + 1))
            for row in (self.positions, self.limits, self.keys, self.new_tokens):
                row[targets] = row[sources]
            for source, target in zip(sources, targets, strict=True):
                self.requests[target] = self.requests[source]
        del self.requests[kept:]
        if kept:
            positions = self.positions[:kept]
            self._longest = int(positions.max())
            self._steps_to_limit = int((self.limits[:kept] - positions).min())
        else:
            self._longest = self._steps_to_limit = 0


class Generator:
    """Generates on one rank of a unit. Every rank calls `generate` with the same arguments and gets the same result.

    max_slots: sequences in flight, over all lanes; max_length: tokens of prompt and response that a slot can hold.
    The cache is taken at the first call and kept until `release`.
    """

    def __init__(self, model: StageModel, *, tp: Group, pp: Group, max_slots: int, max_length: int):
        self._model, self._tp, self._pp = model, tp, pp
        self._max_slots, self._max_length = max_slots, max_length
        self._caches: list[KvCache] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(cache.num_bytes for cache in self._caches)

    def release(self) -> None:
        """Free the cache; the next call takes it anew."""
        self._caches = []

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """A completion for each request, in their order; raises InputError where one does not fit the cache."""
        self._check(requests, params)
        self._reserve()
        lanes = [_Lane(cache, params) for cache in self._caches]
        model = packed_for_decoding(self._model)
        sampler = self._sampler(params)
        waiting = collections.deque(enumerate(requests))
        flights: list[_Flight | None] = [None] * len(lanes)
        completions: dict[int, Completion] = {}
        while waiting or any(flights):
            for number, lane in enumerate(lanes):
                flight = flights[number]
                if flight is not None:
                    for place, tokens, stopped in lane.take(flight.collect()):
                        request = requests[place]
                        completions[place] = Completion(request.place, request.index, tokens, stopped)
                admitted = [waiting.popleft() for _ in range(min(lane.num_free, len(waiting)))]
                busy = bool(admitted or lane.requests)
                flights[number] = self._launch(model, lane, lane.next_step(admitted), sampler, number) if busy else None
        return [completions[place] for place in range(len(requests))]

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        for request in requests:
            length, new = len(request.tokens), params.max_new_tokens
            if not length or length + new > self._max_length:
                raise InputError(
                    f"prompt {request.place} has {length} tokens and may get {new} new ones; "
                    f"a prompt has at least 1 token, and both together are at most {self._max_length}"
                )

    def _reserve(self) -> None:
        if self._caches:
            return
        lanes = min(self._pp.size, self._max_slots)
        for number in range(lanes):
            slots = self._max_slots * (number + 1) // lanes - self._max_slots * number // lanes
            self._caches.append(KvCache(self._model, num_slots=slots, num_columns=self._max_length))

    def _sampler(self, params: SamplingParams) -> Sampler | None:
        model = self._model
        if not model.is_last:
            return None
        assert model.head is not None
        return Sampler(
            params,
            first_row=model.first_row,
            num_rows=model.head.shape[0],
            tp=self._tp,
            device=model.head.device,
        )

    def _launch(self, model: StageModel, lane: _Lane, step: _Step, sampler: Sampler | None, number: int) -> "_Flight":
        """Run this stage's part of a step; its hidden states or tokens are on their way when this returns."""
        pp = self._pp
        hidden = self._incoming(step, number)
        rope = Rope.at(model.spec, step.positions, hidden.dtype, longest=self._max_length)
        attend = CachedAttention(
            lane.cache,
            model,
            num_decode=step.num_decode,
            column=step.column,
            length=step.length,
            prompts=step.prompts,
        )
        hidden = model.body(hidden, rope, attend)
        num_sampled = len(lane.requests)
        if sampler is None:
            sent = pp.send(hidden.contiguous(), pp.rank + 1, tag=number)
            tokens = torch.empty(num_sampled, dtype=torch.int64, device=hidden.device)
            return _Flight(tokens, [sent], pp.irecv(tokens, pp.size - 1, tag=number))
        if step.sampled is not None:
            hidden = hidden[step.sampled]
        tokens = sampler(model.logits(hidden), lane.keys[:num_sampled], lane.positions[:num_sampled] + 1)
        return _Flight(tokens, [pp.send(tokens, stage, tag=number) for stage in range(pp.size - 1)], None)

    def _incoming(self, step: _Step, number: int) -> torch.Tensor:
        """Hidden states [T, H] that enter this stage."""
        model = self._model
        if model.is_first:
            return model.embed(step.tokens)
        dtype = model.state.flats[StateKind.PARAM].dtype
        hidden = torch.empty(len(step.tokens), model.spec.hidden, dtype=dtype, device=step.tokens.device)
        self._pp.recv(hidden, self._pp.rank - 1, tag=number)
        return hidden


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way: what was sent, and the tokens [R] when they are there."""

    tokens: torch.Tensor
    sent: list[Work]
    received: Work | None

    def collect(self) -> torch.Tensor:
        for work in self.sent:
            work.wait()
        if self.received is not None:
            self.received.wait()
        return self.tokens
