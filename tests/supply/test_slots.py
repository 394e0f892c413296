"""Device ids and the slots they stand for, with no cluster."""

import dataclasses

from nereus.cluster import ACCELERATORS
from nereus.supply.slots import DRAIN_MARGIN_S, Node, SlotMap
from nereus.supply.supply import Announcement, SupplyView

CPU, GPU = ACCELERATORS["cpu"], ACCELERATORS["h100"]
A, B, C = (Node(name * 8, f"10.0.0.{i}", 2, CPU) for i, name in enumerate("abc", start=1))


def draining(node: Node, *, at_s: float) -> Node:
    return dataclasses.replace(node, leaves_at_s=at_s)


def nodes_of(slots: SlotMap) -> list[str]:
    return [slot.node_id[0] for slot in slots.slots]


def test_ids_count_slots_node_after_node_and_the_rest_wait_for_nodes_like_these() -> None:
    slots = SlotMap(7, [A, B])
    assert nodes_of(slots)[:4] == ["a", "a", "b", "b"]
    assert [slot.node for slot in slots.slots[4:]] == ["absent/0", "absent/0", "absent/1"]
    assert slots.view((), now_s=0.0) == SupplyView((0, 1, 2, 3))
    assert nodes_of(SlotMap(3, [A, B])) == ["a", "a", "b"]


def test_a_node_that_joins_takes_the_ids_that_have_no_slot_and_the_others_stay() -> None:
    slots = SlotMap(5, [A, B])
    slots.update([C, B, A], busy=(0, 1, 2, 3))
    assert nodes_of(slots) == ["a", "a", "b", "b", "c"]
    slots.update([C, A], busy=(0, 1))
    assert slots.view((0, 1), now_s=0.0).devices == (0, 1, 2, 4), "the second slot of c comes to use"
    slots.update([C, B, A], busy=(0, 1))
    assert nodes_of(slots) == ["a", "a", "c", "b", "c"]
    assert slots.view((0, 1), now_s=0.0).devices == (0, 1, 2, 3, 4)


def test_a_node_that_is_gone_is_absent_and_its_ids_are_kept_while_they_have_workers() -> None:
    slots = SlotMap(4, [A, B])
    slots.update([A, C], busy=(2,))
    assert nodes_of(slots) == ["a", "a", "b", "c"]
    assert slots.view((2,), now_s=0.0).devices == (0, 1, 3)
    assert slots.starts_on([0, 3]) and not slots.starts_on([0, 2]) and not slots.starts_on([4])


def test_a_node_that_drains_announces_its_workers_and_takes_no_other() -> None:
    slots = SlotMap(4, [A, B])
    slots.update([A, draining(B, at_s=1030.0), draining(C, at_s=0.0)], busy=(0, 1, 2))
    assert slots.view((0, 1, 2), now_s=1000.0) == SupplyView((0, 1, 2), (Announcement((2,), 30.0 - DRAIN_MARGIN_S),))
    assert slots.view((0, 1, 2), now_s=1031.0) == SupplyView((0, 1, 2), (Announcement((2,), 0.0),))
    assert slots.view((0, 1), now_s=1000.0) == SupplyView((0, 1)), "once left it is not entered again"
    assert not slots.starts_on([3])


def test_two_nodes_that_drain_are_announced_in_the_order_of_their_deadlines() -> None:
    slots = SlotMap(4, [A, B])
    slots.update([draining(A, at_s=50.0), draining(B, at_s=20.0)], busy=range(4))
    assert slots.view(range(4), now_s=10.0).announced == (
        Announcement((2, 3), 10.0 - DRAIN_MARGIN_S),
        Announcement((0, 1), 40.0 - DRAIN_MARGIN_S),
    )


def test_an_id_stays_of_its_accelerator_type() -> None:
    slots = SlotMap(3, [A])
    slots.update([A, dataclasses.replace(B, accelerator=GPU)], busy=())
    assert slots.view((), now_s=0.0).devices == (0, 1)
