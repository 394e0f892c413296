"""The seam behind which responses are generated, and what crosses it.

    worker --- built with a rank's model and limits ---> RolloutEngine
           --- load -> generate or stream, again and again -> release ---> load ...

Every rank of a unit has an engine of its own, and all of them are called alike, with the same arguments. The worker
alone calls: load when weights are new, release before something else needs the device. `generate.py` is the native
engine; `fake_engine.py` answers without computing.
"""

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from nereus.comm.groups import Group
from nereus.engines.sampling import SamplingParams
from nereus.engines.transformer import StageModel
from nereus.errors import InputError


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
class Footprint:
    """Bytes of keys and values that an engine holds now, and the most it has held at once since it was built."""

    held_bytes: int
    peak_bytes: int


def in_order(requests: Sequence[Request], completions: Iterable[Completion]) -> list[Completion]:
    """The completions of the requests, in the order of these."""
    done = {(completion.place, completion.index): completion for completion in completions}
    return [done[request.place, request.index] for request in requests]


class RolloutEngine(abc.ABC):
    """Generates on one rank of a unit; every rank calls the same methods with the same arguments.

    model: this rank's model, whose weights change only between a `stream` and the next `load`. max_slots: sequences in
    flight at most; max_length: tokens of prompt and response that a sequence can have; cache_bytes: what keys and
    values may take on each rank, None: what `max_slots` sequences of `max_length` tokens need. A completion depends on
    the weights, its request and the sampling parameters alone: not on these limits, on other requests or on the layout.
    Raises InputError where `cache_bytes` does not hold one sequence of `max_length` tokens.
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
        self._max_slots, self._max_length, self._cache_bytes = max_slots, max_length, cache_bytes

    @abc.abstractmethod
    def load(self) -> None:
        """Take the model's weights as they are now. Called before the first `stream` and when they have changed."""

    @abc.abstractmethod
    def stream(self, requests: Sequence[Request], params: SamplingParams) -> Iterator[Completion]:
        """A completion for each request as they end, the same order on every rank. Read to its end before anything else
        is called. Requests of one call differ in place or index. Raises InputError where one is longer than allowed."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give back every byte beside the model's own weights. The next call is `load`; nothing else is forgotten."""

    @property
    @abc.abstractmethod
    def footprint(self) -> Footprint:
        """What the cache takes: at no moment more than `cache_bytes`, nothing after `release`."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """The completions of `stream`, in the order of the requests."""
        return in_order(requests, self.stream(requests, params))

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        for request in requests:
            length, new = len(request.tokens), params.max_new_tokens
            if not length or length + new > self._max_length:
                raise InputError(
                    f"prompt {request.place} has {length} tokens and may get {new} new ones; "
                    f"a prompt has at least 1 token, and both together are at most {self._max_length}"
                )
