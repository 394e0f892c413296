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
from nereus.engines.rollout import Completion, Footprint, Request, RolloutEngine
from nereus.engines.sampling import Sampler, SamplingParams
from nereus.engines.transformer import Rope, StageModel
from nereus.shards.kv_blocks import most_blocks
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


class Generator(RolloutEngine):
    """The native engine. Cache blocks are taken as sequences need them and given back when they end."""

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
        self._num_blocks = most_blocks(
            model.spec,
            model.state.layout,
            model.state.flats[StateKind.PARAM].element_size(),
            sequences=max_slots,
            longest=max_length,
            cache_bytes=cache_bytes,
        )
        self._packed: StageModel | None = None
        self._caches: list[KvCache] = []
        self.use = CacheUse()

    @property
    def footprint(self) -> Footprint:
        return Footprint(sum(cache.num_bytes for cache in self._caches), self.use.peak_bytes)

    def load(self) -> None:
        self._packed = packed_for_decoding(self._model)

    def release(self) -> None:
        self._packed, self._caches = None, []

    @torch.inference_mode()
    def stream(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Completion]:
        model, sampler = self._packed, self._sampler(params)
        assert model is not None, "load comes first"
        self._check(requests, params)
        self._caches = [KvCache(self._model) for _ in range(min(self._pp.size, self._max_slots))]
        blocks = Blocks(self._num_blocks, self._caches)
        lanes, waiting = self._lanes(blocks, params), self._waiting(requests)
        flights: list[_Flight | None] = [None] * len(lanes)
        while waiting or any(flights):
            for number, lane in enumerate(lanes):
                flight = flights[number]
                if flight is not None:
                    for sequence, stopped in lane.take(flight.collect()):
                        yield sequence.completion(stopped)
                step = lane.next_step(waiting)
                flights[number] = self._launch(model, lane, step, sampler, number) if step is not None else None
        self.use.peak_bytes = max(self.use.peak_bytes, blocks.peak_bytes)
        self.use.num_preempted += sum(lane.num_preempted for lane in lanes)
        self.use.num_held_back += sum(lane.num_held_back for lane in lanes)

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
