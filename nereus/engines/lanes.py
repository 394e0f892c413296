"""Which sequences step together, which wait, and which give their place up: scheduling within a bound of cache blocks.

    waiting --admit--> a slot of a lane --step, step, ...--> ended
       ^                     |
       +------preempt--------+     its tokens are kept; when admitted again they are prefilled like a prompt

Waiting sequences are admitted in the order of their requests and only where blocks are left; a new one also leaves
every sequence room for a block more. When running sequences outgrow the bound, the last requested of the lane goes back
to wait. Every step of a lane adds a token to what is kept, and an empty cache has room for one whole sequence, so all
of them end. Decisions follow from the requests, their tokens and the bound alone: every rank of a unit takes the same.
Nothing here computes with a model.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import torch

from nereus.engines.cache import KvCache
from nereus.engines.rollout import Completion, Request
from nereus.engines.sampling import SamplingParams, sequence_key
from nereus.engines.transformer import Packing
from nereus.shards.kv_blocks import BLOCK_TOKENS, blocks_of

GROWTH = 8
"""A cache that grows takes one part in so many more columns than it needs, where blocks are left."""


@dataclasses.dataclass(slots=True)
class Partial:
    """A request under way: its number in the call and its tokens, prompt first, as far as they are kept."""

    number: int
    request: Request
    tokens: list[int]

    @property
    def num_new(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.tokens) - len(self.request.tokens)

    def completion(self, finished: bool) -> Completion:
        new = tuple(self.tokens[len(self.request.tokens) :])
        return Completion(self.request.place, self.request.index, new, finished)


@dataclasses.dataclass(slots=True)
class Blocks:
    """Cache blocks that the lanes of a rank share. peak_bytes: the most their caches held at once, growth included."""

    total: int
    caches: list[KvCache]
    taken: int = 0
    peak_bytes: int = 0

    def within(self, blocks: int, cache: KvCache) -> bool:
        """Whether a lane's cache could be of so many blocks."""
        return self.taken - cache.num_blocks + blocks <= self.total

    def resize(self, cache: KvCache, num_slots: int, num_columns: int, *, used: int, length: int) -> None:
        """Take or give back the blocks of a lane's cache."""
        before, others = cache.num_blocks, sum(other.num_bytes for other in self.caches if other is not cache)
        peak_bytes = cache.resize(num_slots, num_columns, used=used, length=length)
        self.peak_bytes = max(self.peak_bytes, others + peak_bytes)
        self.taken += cache.num_blocks - before
        assert self.taken <= self.total, f"{self.taken} of {self.total} cache blocks"


class Waiting:
    """Sequences that hold no slot, in the order of their requests."""

    def __init__(self, requests: Iterable[Request], *, most_prefilled: int) -> None:
        """most_prefilled: tokens that one step prefills at most, unless one sequence alone has more."""
        self._heap = [
            (number, Partial(number, request, list(request.tokens))) for number, request in enumerate(requests)
        ]
        self.most_prefilled = most_prefilled

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def first(self) -> Partial:
        return self._heap[0][1]

    def pop(self) -> Partial:
        return heapq.heappop(self._heap)[1]

    def push(self, sequence: Partial) -> None:
        heapq.heappush(self._heap, (sequence.number, sequence))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass of a lane computes: a token for each slot in use, then whole prompts of new slots.

    tokens, positions [T]. length: tokens of the longest sequence in use before, the ones of this step included.
    prompts: their packing, cache rows and columns. sampled: which tokens' successors are sampled, None for all.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    num_decode: int
    length: int
    prompts: tuple[Packing, torch.Tensor, torch.Tensor] | None
    sampled: torch.Tensor | None


class Lane:
    """Slots that step together: which sequence each holds and how far it is.

    A clock counts steps. `_since` [slot] is the time at which the slot's sequence would have had no token, so its
    length is the clock less that, and `_joined` the time of its first sampled token here.
    """

    def __init__(self, cache: KvCache, blocks: Blocks, params: SamplingParams, *, max_slots: int, max_length: int):
        device = cache.device
        self.cache, self.blocks, self._params = cache, blocks, params
        self._max_slots, self._max_length = max_slots, max_length
        self.sequences: list[Partial] = []  # by slot in use
        self._since: list[int] = []
        self._joined: list[int] = []
        self._clock = 0
        self.num_preempted = self.num_held_back = 0
        self.positions = torch.zeros(max_slots, dtype=torch.int64, device=device)  # of the last token
        self.limits = torch.zeros_like(self.positions)  # position at which a sequence is cut
        self.keys = torch.zeros_like(self.positions)
        self._history = params.max_new_tokens + 1
        self._new_tokens = torch.zeros(max_slots, self._history, dtype=torch.int64, device=device)  # a ring of steps
        self._all_slots = torch.arange(max_slots, device=device)
        self._stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        self._steps_to_limit = 0

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence in a slot, the last sampled one included."""
        return self._clock - min(self._since, default=self._clock)

    def next_step(self, waiting: Waiting) -> Step | None:
        """Say what to compute next, having preempted and admitted; None where there is nothing, or no room."""
        before = len(self.sequences)
        self._preempt(waiting)
        n, length = len(self.sequences), self._longest
        admitted = self._admitted(waiting, may_return=n == before)
        if not n and not admitted:
            self.blocks.resize(self.cache, 0, 0, used=0, length=0)
            return None
        self._fit(n + len(admitted), max(length, *(len(s.tokens) for s in admitted), 0), used=n, length=length - 1)
        if n:
            self.cache.advance(n)
        else:
            self.cache.column = max(len(sequence.tokens) for sequence in admitted) - 1
        slots, positions = self._all_slots[:n], self.positions[:n]
        tokens = self._new_tokens[:n, self._clock % self._history]
        if not admitted:
            return Step(tokens, positions, n, length, None, None)
        new_tokens, prompts = self._place(admitted)
        last = n - 1 + torch.tensor(prompts[0].lengths, device=tokens.device).cumsum(0)
        return Step(
            tokens=torch.cat((tokens, new_tokens)),
            positions=torch.cat((positions, prompts[0].positions)),
            num_decode=n,
            length=length,
            prompts=prompts,
            sampled=torch.cat((slots, last)),
        )

    def _preempt(self, waiting: Waiting) -> None:
        """Send the last requested sequences back until the others fit the next step."""
        while self.sequences and not self.blocks.within(len(self.sequences) * blocks_of(self._longest), self.cache):
            slot = max(range(len(self.sequences)), key=lambda at: self.sequences[at].number)
            self._keep(slot)
            waiting.push(self.sequences[slot])
            self.num_preempted += 1
            self._release([slot])

    def _admitted(self, waiting: Waiting, *, may_return: bool) -> list[Partial]:
        """The next sequences that get a slot now. None of those that have just been preempted."""
        admitted: list[Partial] = []
        n, longest, prefilled = len(self.sequences), self._longest, 0
        whole = blocks_of(self._max_length)
        while may_return and waiting and n + len(admitted) < self._max_slots:
            rows, tokens = n + len(admitted), len(waiting.first.tokens)
            each = blocks_of(max(longest, tokens))
            if rows:
                each = min(each + 1, whole)
            if not self.blocks.within((rows + 1) * each, self.cache):
                self.num_held_back += 1
                break
            if admitted and prefilled + tokens > waiting.most_prefilled:
                break
            admitted.append(waiting.pop())
            longest, prefilled = max(longest, tokens), prefilled + tokens
        return admitted

    def _fit(self, rows: int, tokens: int, *, used: int, length: int) -> None:
        """Have room for so many sequences and tokens; give back what is more than twice as much."""
        cache, needed = self.cache, blocks_of(tokens)
        columns = cache.num_columns // BLOCK_TOKENS
        if cache.num_slots >= rows and columns >= needed and cache.num_blocks < 2 * rows * needed + 1:
            return
        wide = min(needed + needed // GROWTH, blocks_of(self._max_length))
        if not self.blocks.within(rows * wide, cache):
            wide = needed
        self.blocks.resize(cache, rows, wide * BLOCK_TOKENS, used=used, length=length)

    def _place(self, admitted: Sequence[Partial]) -> tuple[torch.Tensor, tuple[Packing, torch.Tensor, torch.Tensor]]:
        """Give sequences the next slots; their tokens [P] and their packing, cache rows and columns."""
        device, first = self.positions.device, len(self.sequences)
        packing = Packing.of([len(sequence.tokens) for sequence in admitted], device)
        tokens = torch.tensor([token for sequence in admitted for token in sequence.tokens], device=device)
        requests = [sequence.request for sequence in admitted]
        keys = [sequence_key(self._params.seed, request.place, request.index) for request in requests]
        limits = [len(request.tokens) - 1 + self._params.max_new_tokens for request in requests]
        slots = self._all_slots[first : first + len(admitted)]
        self.keys[slots] = torch.tensor(keys, dtype=torch.int64, device=device)
        self.positions[slots] = torch.tensor(packing.lengths, device=device) - 1
        self.limits[slots] = torch.tensor(limits, device=device)
        self.sequences += admitted
        self._since += [self._clock - length for length in packing.lengths]
        self._joined += [self._clock] * len(admitted)
        self._count_down()
        return tokens, (packing, *self.cache.place(slots, packing))

    def take(self, tokens: torch.Tensor) -> list[tuple[Partial, bool]]:
        """Append tokens, one a slot in use; every sequence that ended, and whether a stop token ended it."""
        n = len(self.sequences)
        positions = self.positions[:n].add_(1)
        self._clock += 1
        self._new_tokens[:n, self._clock % self._history] = tokens
        self._steps_to_limit -= 1
        if self._steps_to_limit and not self._params.stop_ids:
            return []
        stopped = (tokens.unsqueeze(1) == self._stops).any(1)
        ended = (stopped | (positions >= self.limits[:n])).nonzero().squeeze(1).tolist()
        if not ended:
            return []
        by_stop = stopped.tolist()
        for slot in ended:
            self._keep(slot)
        done = [(self.sequences[slot], by_stop[slot]) for slot in ended]
        self._release(ended)
        return done

    def _keep(self, slot: int) -> None:
        """Append what was sampled in a slot to its sequence's tokens."""
        row, first, last = self._new_tokens[slot], (self._joined[slot] + 1) % self._history, self._clock % self._history
        sampled = row[first : last + 1] if first <= last else torch.cat((row[first:], row[: last + 1]))
        self.sequences[slot].tokens += sampled.tolist()

    def _release(self, ended: list[int]) -> None:
        """Free slots; the last ones in use move into the gaps."""
        kept = len(self.sequences) - len(ended)
        targets = [slot for slot in ended if slot < kept]
        gone = set(ended)
        sources = [slot for slot in range(kept, len(self.sequences)) if slot not in gone]
        if targets:
            self.cache.move(sources, targets, self._longest - 1)
            for row in (self.positions, self.limits, self.keys, self._new_tokens):
                row[targets] = row[sources]
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]
            self._since[target], self._joined[target] = self._since[source], self._joined[source]
        del self.sequences[kept:], self._since[kept:], self._joined[kept:]
        self._count_down()

    def _count_down(self) -> None:
        """Steps until the first sequence in a slot is cut."""
        left = (self._params.max_new_tokens - sequence.num_new for sequence in self.sequences)
        self._steps_to_limit = min(
            (each - (self._clock - joined) for each, joined in zip(left, self._joined, strict=True)), default=0
        )
