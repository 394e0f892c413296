"""Which devices must be left at a boundary because their loss is announced. Pure.

A device is left at the first boundary from which one more step and two moves to the devices that stay would run past
its deadline; once left it stays so while it is announced.
"""

import dataclasses
from collections.abc import Callable, Mapping

from nereus.supply.supply import SupplyView

LEAD_FACTOR = 1.5
"""How much longer than the last one, or than predicted, a step before a deadline may take."""

LEAD_MOVES = 2
"""How many moves must fit between that step and the deadline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
    """left: devices that are not used any more. longest_move_s: of the transitions so far.

    exits: predicted seconds of moving off, by the devices that stay; they hold until the next replan or move.
    """

    left: frozenset[int] = frozenset()
    longest_move_s: float = 0.0
    exits: Mapping[tuple[int, ...], float] = dataclasses.field(default_factory=dict)

    def seen(self, view: SupplyView, *, step_s: float, exit_s: Callable[[tuple[int, ...]], float]) -> "Deadlines":
        """At a boundary with this view.

        step_s: what the last step took or the next is predicted to, whichever is longer. exit_s: what moving to the
        devices that stay is predicted to take, 0 where nothing has to move or none can; asked once for each.
        """
        exits, left = dict(self.exits), self.left & view.leaving
        for deadline_s in sorted({a.deadline_s for a in view.announced if a.leaving}):
            gone = left | view.leaving_within(deadline_s)
            kept = tuple(device for device in view.devices if device not in gone)
            if kept not in exits:
                exits[kept] = exit_s(kept)
            if deadline_s <= LEAD_FACTOR * step_s + LEAD_MOVES * max(self.longest_move_s, exits[kept]):
                left = gone
        return Deadlines(left, self.longest_move_s, exits)

    def usable(self, view: SupplyView) -> tuple[int, ...]:
        """The view's devices without those that are left."""
        return tuple(device for device in view.devices if device not in self.left)

    def replanned(self) -> "Deadlines":
        """After a replan began: what moving off takes is asked anew."""
        return dataclasses.replace(self, exits={})

    def moved(self, seconds: float) -> "Deadlines":
        """After a move that took so long; 0 where it was none of the live state."""
        return Deadlines(self.left, max(self.longest_move_s, seconds))
