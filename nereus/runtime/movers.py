"""The executor's calls as calls to the workers of a pool."""

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt
from nereus.moving.executor import Movers
from nereus.plan import Plan, Role
from nereus.runtime.seam import Pool, answers, gather
from nereus.runtime.worker import RoleSetup, Worker
from nereus.shards.state import Counters

CENSUS_TIMEOUT = timedelta(seconds=60)
"""A worker that does not say within this time what it holds is lost."""


class PoolMovers(Movers):
    """Moves state among the workers of a pool. `timeout`: how long any one call may take."""

    def __init__(self, pool: Pool, roles: Mapping[Role, RoleSetup], *, timeout: timedelta) -> None:
        self._pool, self._roles, self._timeout = pool, roles, timeout

    def prepare(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, Export | None]:
        return self._each(orders, lambda device: (Worker.prepare, orders[device]))

    def move(
        self, orders: Mapping[int, DeviceOrder], exports: Mapping[int, Export], counters: Counters
    ) -> Mapping[int, Receipt]:
        def call(device: int) -> tuple[Any, ...]:
            sources = {move.source for move in orders[device].moves.incoming}
            return Worker.move, orders[device].key, {d: e for d, e in exports.items() if d in sources}, counters

        return self._each(orders, call)

    def digests(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, DeviceDigests]:
        return self._each(orders, lambda device: (Worker.digests, orders[device].key))

    def settle(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._each(keys, lambda device: (Worker.settle, keys[device]))

    def census(self) -> Mapping[int, tuple[BufferKey, ...]]:
        calls = {device: self._pool.call(device, Worker.whole_keys) for device in self._pool.devices}
        return answers(calls, timeout=min(self._timeout, CENSUS_TIMEOUT))

    def release(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._each(keys, lambda device: (Worker.release, keys[device]))

    def seat(self, epoch: int, plan: Plan) -> None:
        devices = dict.fromkeys(plan.devices)
        shared = self._pool.share(plan), self._pool.share(self._roles), self._pool.share(nodes_of(self._pool))
        self._each(devices, lambda device: (Worker.adopt, epoch, shared[0]))
        self._each(devices, lambda device: (Worker.seat, epoch, *shared))

    def retire(self, epoch: int) -> None:
        self._each(dict.fromkeys(self._pool.devices), lambda device: (Worker.unseat, epoch))

    def _each(self, devices: Mapping[int, object], call: Callable[[int], tuple[Any, ...]]) -> dict[int, Any]:
        """One call a device, all at once."""
        calls, task = {}, ""
        for device in devices:
            method, *args = call(device)
            calls[device], task = self._pool.call(device, method, *args), method.__name__
        return gather(calls, task, timeout=self._timeout)


def nodes_of(pool: Pool) -> dict[int, str]:
    """The node of every device of a pool."""
    return {device.id: device.node for device in pool.cluster.devices}


def node_finder(pool: Pool) -> Callable[[int], str]:
    """The node of a device; the pool's map is built once, when a node is first asked for."""
    nodes = functools.cache(lambda: nodes_of(pool))
    return lambda device: nodes()[device]
