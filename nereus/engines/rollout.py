"""What goes into generation and what comes out of it."""

import dataclasses
from collections.abc import Sequence


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
