"""Generation on one unit: continuous batching over slots of a key/value cache, under tensor and pipeline parallelism.

Every rank of the unit runs the same loop over the same requests and takes the same decisions, because each learns every
sampled token; only hidden states and tokens travel.

    lane 0:   admit -> launch ---- hidden ----> ... last stage samples ---- tokens ----> collect -> admit -> ...
    lane 1:            admit -> launch ...                (a lane a pipeline stage, so that stages overlap)

In `launch` a stage waits for the hidden states of the stage before it; in `collect` every stage but the last waits for
the last one's tokens. Sends do not wait. `lanes.py` says which sequences a step computes within the bound of
the cache.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from nereus.comm.groups import Group, Work
from nereus.engines.cache import CachedAttention, KvCache
from nereus.engines.lanes import Blocks, Lane, Step, Waiting
from nereus.engines.packing import packed_for_decoding
from nereus.engines.rollout import Completion, Request
from nereus.engines.sampling import Sampler, SamplingParams
from nereus.engines.transformer import Rope, StageModel
from nereus.errors import InputError
from nereus.shards.kv_blocks import block_bytes, blocks_of
from nereus.shards.state import StateKind


@dataclasses.dataclass(slots=True)
class CacheUse:
    """What a generator's calls made of its cache so far.

    peak_bytes: the most held at once, old and new rows of a growing cache included. num_preempted: sequences that gave
    their slot up; num_held_back: steps at which the first waiting one found a slot but too few blocks.
    """

    peak_bytes: int = 0
    num_preempted: int = 0
    num_held_back: int = 0


class Generator:
    """Generates on one rank of a unit. Every rank calls `generate` with the same arguments and gets the same result.

    max_slots: sequences in flight, over all lanes; max_length: tokens of prompt and response that a sequence can have.
    cache_bytes: what keys and values may take on each rank of the unit; None: as many as `max_slots` sequences of
    `max_length` tokens. The same completions come out whatever the bound. Blocks are taken as sequences need them and
    given back when a call ends. Raises InputError where the bound does not hold one whole sequence.
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
        self._model, self._tp, self._pp = model, tp, pp
        self._max_slots, self._max_length = max_slots, max_length
        self._num_blocks = _num_blocks(model, max_slots, max_length, cache_bytes)
        self._caches: list[KvCache] = []
        self.use = CacheUse()

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(cache.num_bytes for cache in self._caches)

    def release(self) -> None:
        """Free the cache; the next call takes it anew."""
        self._caches = []

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """A completion for each request, in their order; raises InputError where one does not fit the cache."""
        completions = dict(self._completed(requests, params))
        return [completions[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _completed(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """(number of the request, completion) as sequences end."""
        self._check(requests, params)
        self._caches = [KvCache(self._model) for _ in range(min(self._pp.size, self._max_slots))]
        blocks = Blocks(self._num_blocks, self._caches)
        lanes, waiting = self._lanes(blocks, params), self._waiting(requests)
        model, sampler = packed_for_decoding(self._model), self._sampler(params)
        flights: list[_Flight | None] = [None] * len(lanes)
        while waiting or any(flights):
            for number, lane in enumerate(lanes):
                flight = flights[number]
                if flight is not None:
                    for sequence, stopped in lane.take(flight.collect()):
                        yield sequence.number, sequence.completion(stopped)
                step = lane.next_step(waiting)
                flights[number] = self._launch(model, lane, step, sampler, number) if step is not None else None
        self.use.peak_bytes = max(self.use.peak_bytes, blocks.peak_bytes)
        self.use.num_preempted += sum(lane.num_preempted for lane in lanes)
        self.use.num_held_back += sum(lane.num_held_back for lane in lanes)

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        for request in requests:
            length, new = len(request.tokens), params.max_new_tokens
            if not length or length + new > self._max_length:
                raise InputError(
                    f"prompt {request.place} has {length} tokens and may get {new} new ones; "
                    f"a prompt has at least 1 token, and both together are at most {self._max_length}"
                )

    def _lanes(self, blocks: Blocks, params: SamplingParams) -> list[Lane]:
        """A lane a pipeline stage; their caches share the blocks."""
        count = len(blocks.caches)
        ends = [self._max_slots * number // count for number in range(count + 1)]
        return [
            Lane(cache, blocks, params, max_slots=end - start, max_length=self._max_length)
            for cache, start, end in zip(blocks.caches, ends, ends[1:], strict=False)
        ]

    def _waiting(self, requests: Sequence[Request]) -> Waiting:
        """All requests; a step prefills at most what a lane of the longest prompts has."""
        longest = max((len(request.tokens) for request in requests), default=0)
        return Waiting(requests, most_prefilled=longest * -(-self._max_slots // self._pp.size))

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

    def _launch(self, model: StageModel, lane: Lane, step: Step, sampler: Sampler | None, number: int) -> "_Flight":
        """Run this stage's part of a step; its hidden states or tokens are on their way when this returns."""
        pp = self._pp
        hidden = self._incoming(step, number)
        rope = Rope.at(model.spec, step.positions, hidden.dtype, longest=self._max_length)
        attend = CachedAttention(
            lane.cache,
            model,
            num_decode=step.num_decode,
            length=step.length,
            prompts=step.prompts,
        )
        hidden = model.body(hidden, rope, attend)
        num_sampled = len(lane.sequences)
        if sampler is None:
            sent = pp.send(hidden.contiguous(), pp.rank + 1, tag=number)
            tokens = torch.empty(num_sampled, dtype=torch.int64, device=hidden.device)
            return _Flight(tokens, [sent], pp.irecv(tokens, pp.size - 1, tag=number))
        if step.sampled is not None:
            hidden = hidden[step.sampled]
        tokens = sampler(model.logits(hidden), lane.keys[:num_sampled], lane.positions[:num_sampled] + 1)
        return _Flight(tokens, [pp.send(tokens, stage, tag=number) for stage in range(pp.size - 1)], None)

    def _incoming(self, step: Step, number: int) -> torch.Tensor:
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


def _num_blocks(model: StageModel, max_slots: int, max_length: int, cache_bytes: int | None) -> int:
    """Cache blocks of a rank, the same on every rank of the unit; raises InputError where they hold no sequence."""
    one = blocks_of(max_length)
    if cache_bytes is None:
        return max_slots * one
    each = block_bytes(model.spec, model.state.layout, model.state.flats[StateKind.PARAM].element_size())
    if cache_bytes < one * each:
        raise InputError(
            f"cache_bytes is {cache_bytes:,}; one sequence of {max_length} tokens needs {one * each:,} on a rank of "
            f"{model.state.layout}"
        )
    return min(max_slots * one, cache_bytes // each)
