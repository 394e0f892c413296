"""Shortens the order of an in-place transition without breaking what it waits for or running out of memory. Pure.

The given order is feasible but blind to time. Here orders are built anew, operation by operation: among those whose
predecessors are placed and whose buffers fit now, the one that can start early and has much to come after it goes next.
Weights of the two are drawn at random from a fixed seed; the shortest order wins, the given one included. An order that
runs into a dead end is dropped. Then single operations are moved to other places, as long as no move makes it longer.
"""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from nereus.shards.overlap import IntArray
from nereus.transition.steps import Step

MAX_OPERATIONS = 128
"""Transitions with more operations keep the order they have."""
EVALUATIONS = 4000
"""Candidate operations looked at over all orders built; some tens of milliseconds."""
MOVES = 1500
"""Moves of single operations tried; most are turned down by what the operation follows, in microseconds."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A step, the indices of those it follows, and the bytes it acquires at its start and frees at its end."""

    step: Step
    after: tuple[int, ...]
    acquired_bytes: IntArray
    freed_bytes: IntArray

    @property
    def devices(self) -> frozenset[int]:
        step = self.step
        return frozenset(np.concatenate([step.readers, step.acquires.devices, step.releases.devices]).tolist())


def shortest_order(pieces: Sequence[Piece], *, used: IntArray, limit: IntArray) -> tuple[int, ...]:
    """Indices of the pieces, whose given order is feasible, in the shortest feasible order found.

    used, limit: [max id + 1] bytes held before the first piece, and what each device can hold.
    """
    given = tuple(range(len(pieces)))
    if not 2 < len(pieces) <= MAX_OPERATIONS:
        return given
    trial = _Trials(pieces, used, limit)
    best, best_s = given, trial.seconds(given)
    rng = random.Random(0)
    weight, noise = 1.0, 0.0
    while trial.evaluations < EVALUATIONS and best_s > trial.bound_s * (1 + 1e-9):
        order = trial.build(weight, [1 + noise * rng.random() for _ in pieces])
        if order is not None and trial.seconds(order) < best_s:
            best, best_s = order, trial.seconds(order)
        weight, noise = rng.choice((0.05, 0.3, 1.0, 3.0)), rng.choice((0.0, 0.3, 1.0, 3.0))
    return _improved(trial, best, best_s, rng)


def _improved(trial: "_Trials", best: tuple[int, ...], best_s: float, rng: random.Random) -> tuple[int, ...]:
    """The order after moves of single operations, each kept unless it makes the transition longer."""
    for _ in range(MOVES):
        if best_s <= trial.bound_s * (1 + 1e-9):
            break
        place, to = rng.randrange(len(best)), rng.randrange(len(best))
        order = list(best)
        moved = order.pop(place)
        order.insert(to, moved)
        if place == to or not trial.follows(order, min(place, to), max(place, to)):
            continue
        seconds = trial.seconds(order)
        if seconds <= best_s and trial.fits(order):
            best, best_s = tuple(order), seconds
    return best


class _Trials:
    """Builds and times orders of one set of pieces."""

    def __init__(self, pieces: Sequence[Piece], used: IntArray, limit: IntArray) -> None:
        self.pieces = pieces
        self.used, self.limit = used, limit
        self.evaluations = 0
        devices = [piece.devices for piece in pieces]
        self.conflicts = [
            [j for j, other in enumerate(devices) if j != i and not mine.isdisjoint(other)]
            for i, mine in enumerate(devices)
        ]
        self.followers: list[list[int]] = [[] for _ in pieces]
        for i, piece in enumerate(pieces):
            for before in piece.after:
                self.followers[before].append(i)
        self.tails = [piece.step.load.seconds for piece in pieces]
        for i in range(len(pieces) - 1, -1, -1):
            longest = max((self.tails[j] for j in self.followers[i]), default=0.0)
            self.tails[i] = pieces[i].step.load.seconds + longest
        busy: dict[int, float] = {}
        for i, mine in enumerate(devices):
            for device in mine:
                busy[device] = busy.get(device, 0.0) + pieces[i].step.load.seconds
        self.bound_s = max([*busy.values(), *self.tails])

    def seconds(self, order: Sequence[int]) -> float:
        """End of the last operation when each starts as soon as its predecessors and devices allow."""
        earliest = [0.0] * len(self.pieces)
        return max(self._place(index, earliest) for index in order)

    def _place(self, index: int, earliest: list[float]) -> float:
        """The end of an operation; those that wait for it cannot start before."""
        end = earliest[index] + self.pieces[index].step.load.seconds
        for i in (*self.conflicts[index], *self.followers[index]):
            if earliest[i] < end:
                earliest[i] = end
        return end

    def build(self, weight: float, factors: Sequence[float]) -> tuple[int, ...] | None:
        """One order by the rule of this module, or None at a dead end."""
        used, earliest = self.used.copy(), [0.0] * len(self.pieces)
        missing = [len(piece.after) for piece in self.pieces]
        ready = [i for i, count in enumerate(missing) if not count]
        order: list[int] = []
        while ready:
            ready.sort(key=lambda i: earliest[i] - weight * factors[i] * self.tails[i])
            chosen = next((i for i in ready if self._fits(i, used)), None)
            if chosen is None:
                return None
            ready.remove(chosen)
            order.append(chosen)
            self._place(chosen, earliest)
            piece = self.pieces[chosen]
            used[piece.step.acquires.devices] += piece.acquired_bytes
            used[piece.step.releases.devices] -= piece.freed_bytes
            for follower in self.followers[chosen]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        return tuple(order)

    def follows(self, order: Sequence[int], first: int, last: int) -> bool:
        """Whether the operations from place `first` to `last` come after what they follow."""
        place = {index: i for i, index in enumerate(order)}
        return all(place[before] < place[i] for i in order[first : last + 1] for before in self.pieces[i].after)

    def fits(self, order: Sequence[int]) -> bool:
        """Whether every operation fits when its turn comes."""
        used = self.used.copy()
        for index in order:
            if not self._fits(index, used):
                return False
            piece = self.pieces[index]
            used[piece.step.acquires.devices] += piece.acquired_bytes
            used[piece.step.releases.devices] -= piece.freed_bytes
        return True

    def _fits(self, index: int, used: IntArray) -> bool:
        self.evaluations += 1
        devices = self.pieces[index].step.acquires.devices
        if not len(devices):
            return True
        return bool((used[devices] + self.pieces[index].acquired_bytes <= self.limit[devices]).all())
