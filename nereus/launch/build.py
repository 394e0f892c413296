"""The seam between a run and the machines it runs on: what stands on the other side is one value.

    recipe, job --build--> Machinery: a cluster, its supply, and a started runtime for a plan

Here it is built on Ray. What else can make a `Machinery`, a simulator say, stands in its place in `run_training`.
"""

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from nereus.cluster import Cluster
from nereus.controller import Progress
from nereus.launch.job import Job
from nereus.plan import Plan
from nereus.recipe.config import RunConfig
from nereus.runtime.live import LiveRuntime
from nereus.runtime.ray_pool import RayPool, RaySettings, RaySupply
from nereus.runtime.seam import Runtime
from nereus.supply.supply import Supply, configured_supply

GB = 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class Machinery:
    """What a run needs of the machines it runs on.

    supply: which of the cluster's devices the job may use, by time.
    start: a runtime whose workers stand on a plan; called once.
    close: ends the workers and whatever was started for them.
    """

    cluster: Cluster
    supply: Supply
    start: Callable[[Plan], Runtime]
    close: Callable[[], None]


class Build(Protocol):
    """Makes the machinery of a job. Where it raises, it leaves nothing running."""

    def __call__(self, config: RunConfig, job: Job, progress: Progress, /) -> Machinery: ...


def build_on_ray(config: RunConfig, job: Job, progress: Progress) -> Machinery:
    """Workers under Ray, started on this machine or joined; a folder they cannot read is refused before they start."""
    pool = RayPool(ray_settings(config))
    try:
        joined = RaySupply(pool) if follows_cluster(config) else None
        supply = configured_supply(config.supply, pool.cluster.device_ids, otherwise=joined)
        progress("starting Ray", 0, 0)
        pool.connect()
        for path in (config.run.dir, *sorted({role.folder / "config.json" for role in job.setup.roles.values()})):
            pool.check_shared(path)
        cluster = pool.cluster
    except BaseException:
        pool.close()
        raise

    def start(plan: Plan) -> Runtime:
        runtime = LiveRuntime(pool, job.setup, plan, on_operation=lambda end: progress(str(end), end.done, end.total))
        runtime.start()
        return runtime

    return Machinery(cluster, supply, start, pool.close)


def follows_cluster(config: RunConfig) -> bool:
    """Whether the nodes of a joined cluster are the job's supply."""
    return config.adapt and config.cluster.address is not None and config.supply.trace is None


def ray_settings(config: RunConfig) -> RaySettings:
    """A job that follows its cluster may start once its first plan has its devices, any one where none is named."""
    cluster, plan = config.cluster, config.initial_plan
    first = max(plan.devices) + 1 if plan else 1
    return RaySettings(
        num_workers=cluster.workers,
        timeout=timedelta(seconds=cluster.timeout_s),
        address=cluster.address,
        device=cluster.device,
        memory_bytes=int(cluster.memory_gb * GB) if cluster.memory_gb is not None else None,
        cores_per_node=cluster.cores or os.cpu_count(),
        min_workers=first if follows_cluster(config) else None,
    )
