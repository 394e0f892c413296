"""Which slot of which node a device id stands for, while nodes join a cluster, drain and go. No Ray in here.

    nodes of the cluster --SlotMap.update--> a slot for every id --SlotMap.view--> SupplyView

An id keeps its slot while the node lives. Once the node is gone, the id is given to a slot of a node that joins.
"""

import collections
import dataclasses
from collections.abc import Collection, Sequence

from nereus.cluster import Accelerator
from nereus.supply.supply import Announcement, SupplyView

DRAIN_MARGIN_S = 5.0
"""A node is announced to leave this long before its deadline. Predictions cover the step and moving off the node; the
margin is for the rest, such as the end of its workers and a clock that differs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where the worker of a device goes."""

    node_id: str
    address: str
    accelerator: Accelerator

    @property
    def node(self) -> str:
        return f"{self.address}/{self.node_id[:6]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A living node. leaves_at_s: when it will be gone, in seconds since the epoch, where it drains (0: at once)."""

    id: str
    address: str
    num_slots: int
    accelerator: Accelerator
    leaves_at_s: float | None = None

    @property
    def slot(self) -> Slot:
        return Slot(self.id, self.address, self.accelerator)

    @property
    def drains(self) -> bool:
        """Such a node takes no new worker."""
        return self.leaves_at_s is not None


class SlotMap:
    """The slots of devices 0 to `num_devices` - 1, first given node after node; there must be at least one.

    An id without a slot stands for one of a node that has yet to join: like the first slot, and as many to a node as
    the largest node has.
    """

    def __init__(self, num_devices: int, nodes: Sequence[Node]) -> None:
        self._nodes = {node.id: node for node in nodes}
        open_nodes = [node for node in nodes if not node.drains]
        living = [node.slot for node in open_nodes for _ in range(node.num_slots)]
        per_node = max(node.num_slots for node in open_nodes)
        absent = [Slot(str(i // per_node), "absent", living[0].accelerator) for i in range(num_devices)]
        self._slots = [*living, *absent][:num_devices]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """By device."""
        return tuple(self._slots)

    def update(self, nodes: Sequence[Node], busy: Collection[int]) -> None:
        """Give slots of nodes that have joined to ids without a living one, which stay of their accelerator type.

        busy: devices that have a worker.
        """
        self._nodes = {node.id: node for node in nodes}
        free = [d for d, slot in enumerate(self._slots) if slot.node_id not in self._nodes and d not in busy]
        taken = collections.Counter(slot.node_id for slot in self._slots)
        for node in nodes:
            if not node.drains:
                fitting = [device for device in free if self._slots[device].accelerator == node.accelerator]
                for device in fitting[: node.num_slots - taken[node.id]]:
                    self._slots[device] = node.slot
                    free.remove(device)

    def starts_on(self, devices: Collection[int]) -> bool:
        """Whether each of these devices has a node that takes a worker."""
        taking = {node.id for node in self._nodes.values() if not node.drains}
        return all(device < len(self._slots) and self._slots[device].node_id in taking for device in devices)

    def view(self, busy: Collection[int], *, now_s: float) -> SupplyView:
        """What may be used. Of a node that drains only what has a worker may be, until shortly before its deadline.

        now_s: seconds since the epoch.
        """
        here: list[int] = []
        leaving: dict[float, list[int]] = {}
        for device, slot in enumerate(self._slots):
            node = self._nodes.get(slot.node_id)
            if node is None or (node.drains and device not in busy):
                continue
            here.append(device)
            if node.leaves_at_s is not None:
                leaving.setdefault(node.leaves_at_s, []).append(device)
        announced = tuple(
            Announcement(tuple(ids), max(0.0, due_s - DRAIN_MARGIN_S - now_s)) for due_s, ids in sorted(leaving.items())
        )
        return SupplyView(tuple(here), announced)
