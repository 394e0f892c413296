"""The node of a device, asked for by the driver."""

from datetime import timedelta

from nereus.cluster import Cluster
from nereus.runtime.movers import node_finder
from nereus.runtime.thread_pool import ThreadPool


class CountingPool(ThreadPool):
    """Counts how often its cluster is built."""

    built = 0

    @property
    def cluster(self) -> Cluster:
        self.built += 1
        return super().cluster


def test_the_cluster_is_built_once_however_many_devices_are_asked_for() -> None:
    pool = CountingPool(64, timeout=timedelta(seconds=5), num_nodes=8)
    node_of = node_finder(pool)
    assert pool.built == 0
    nodes = [node_of(device) for device in range(64)]
    assert pool.built == 1
    assert nodes == [pool.cluster.device(device).node for device in range(64)]
