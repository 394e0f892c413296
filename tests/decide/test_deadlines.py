"""When announced devices are left, on written deadlines."""

import pytest

from nereus.decide.deadlines import Deadlines
from nereus.supply.supply import Announcement, SupplyView


def view(*deadlines_s, devices=(0, 1, 2, 3)):
    """Device 3 leaves at the first deadline, 2 at the second."""
    return SupplyView(devices, tuple(Announcement((3 - i,), s) for i, s in enumerate(deadlines_s)))


@pytest.mark.parametrize(("deadline_s", "usable"), [(7.5, (0, 1, 2)), (7.51, (0, 1, 2, 3))])
def test_a_device_is_left_when_a_step_half_longer_and_two_moves_would_pass_its_deadline(deadline_s, usable):
    seen = Deadlines().seen(view(deadline_s), step_s=1.0, exit_s=lambda kept: 3.0)
    assert seen.usable(view(deadline_s)) == usable


def test_a_device_that_was_left_stays_so_while_it_is_announced_and_is_back_when_that_is_withdrawn():
    left = Deadlines().seen(view(1.0), step_s=1.0, exit_s=lambda kept: 0.0)
    still = left.seen(view(100.0), step_s=1.0, exit_s=lambda kept: 0.0)
    back = still.seen(view(), step_s=1.0, exit_s=lambda kept: 0.0)
    assert [d.usable(view()) for d in (left, still, back)] == [(0, 1, 2), (0, 1, 2), (0, 1, 2, 3)]


def test_moving_off_is_asked_once_for_each_set_that_stays_until_a_replan_or_a_move():
    asked = []

    def exit_s(kept):
        asked.append(kept)
        return 1.0

    deadlines = Deadlines()
    for _ in range(3):
        deadlines = deadlines.seen(view(50.0, 90.0), step_s=1.0, exit_s=exit_s)
    assert asked == [(0, 1, 2), (0, 1)]
    for again in (deadlines.replanned(), deadlines.moved(0.0)):
        again.seen(view(50.0), step_s=1.0, exit_s=exit_s)
    assert asked[2:] == [(0, 1, 2)] * 2


def test_the_longest_transition_so_far_counts_where_it_is_longer_than_predicted():
    slow = Deadlines().moved(20.0).moved(2.0)
    assert slow.longest_move_s == 20.0
    assert slow.seen(view(41.0), step_s=1.0, exit_s=lambda kept: 3.0).left == {3}
    assert Deadlines().seen(view(41.0), step_s=1.0, exit_s=lambda kept: 3.0).left == frozenset()
