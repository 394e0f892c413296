"""The cluster as found: what this machine has, or the nodes of a running Ray. Written ones are `nereus.cluster`'s.

local             -> NVML, in this process
ray, ray:ADDRESS  -> a child process that joins Ray, answers and ends: this one imports neither Ray nor torch, and
                     an address that does not answer costs seconds
"""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from nereus.cluster import ACCELERATORS, Accelerator, Cluster, cluster_of, load_cluster, similar_accelerator
from nereus.errors import ClusterError, ConfigError
from nereus.launch.nvml import Gpu, local_gpus

CONNECT_TIMEOUT = timedelta(seconds=3)
"""For a first connection to the address of a Ray cluster."""

ANSWER_TIMEOUT = timedelta(seconds=15)
"""For what listens there to say what it has; loading Ray takes some seconds of it."""

JOIN_TIMEOUT = timedelta(seconds=30)
"""The same before a run joins it, which a busy machine must not keep from starting."""

_ASK_RAY = "import sys; from nereus.runtime.ray_pool import print_slots; print_slots(sys.argv[1])"


def find_cluster(text: str) -> Cluster:
    """The cluster of `local`, `ray`, `ray:HOST:PORT`, `ray://HOST:PORT`, `8x8xh200` or a YAML file by path.

    Raises ClusterError where it cannot be read or found.
    """
    if text == "local":
        return local_cluster()
    if text == "ray" or text.startswith("ray:"):
        return ray_cluster(text if text.startswith("ray://") else text.removeprefix("ray").removeprefix(":") or "auto")
    return load_cluster(text)


def local_cluster() -> Cluster:
    """This machine's NVIDIA GPUs, all of them; without a driver a CPU worker for each core this process may use."""
    gpus = local_gpus()
    if gpus:
        return cluster_of(("local", accelerator_of(gpu), gpu.memory_bytes) for gpu in gpus)
    cores = usable_cores()
    return cluster_of([("local", ACCELERATORS["cpu"], None)] * cores, cores_per_node=cores)


def usable_cores() -> int:
    """Processor cores that this process may run on: those of its affinity, and no more than its control groups give."""
    limits = [len(os.sched_getaffinity(0))]
    for quota, period in (
        _quota_v2(Path("/sys/fs/cgroup")),
        _quota_v1(Path("/sys/fs/cgroup/cpu")),
    ):
        if quota > 0 and period > 0:
            limits.append(max(1, round(quota / period)))
    return min(limits)


def _quota_v2(root: Path) -> tuple[int, int]:
    """(quota, period) in microseconds of a control group of version 2; (0, 0): none is set."""
    words = _words(root / "cpu.max")
    return (int(words[0]), int(words[1])) if len(words) == 2 and words[0].isdigit() else (0, 0)


def _quota_v1(root: Path) -> tuple[int, int]:
    """The same of version 1."""
    quota, period = _words(root / "cpu.cfs_quota_us"), _words(root / "cpu.cfs_period_us")
    return (int(quota[0]), int(period[0])) if quota and period and quota[0].isdigit() else (0, 0)


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def accelerator_of(gpu: Gpu) -> Accelerator:
    """The known type nearest to what a driver reports; without NVLink its GPUs talk over PCIe."""
    found = similar_accelerator(
        gpu.name, memory_bytes=gpu.memory_bytes, memory_bytes_per_s=gpu.memory_bytes_per_s
    )  # fmt: skip
    if gpu.has_nvlink or gpu.pcie_bytes_per_s is None:
        return found
    return dataclasses.replace(found, intra_node_bytes_per_s=min(found.intra_node_bytes_per_s, gpu.pcie_bytes_per_s))


def ray_cluster(address: str) -> Cluster:
    """The GPUs of a running Ray cluster, or where no node has any, a CPU worker for each processor slot.

    address: as `ray.init` takes it (`auto`, `HOST:PORT`, `ray://HOST:PORT`). Types are Ray's `accelerator_type:NAME`
    resources. Raises ClusterError where nothing answers within seconds.
    """
    slots = _ask(address, ANSWER_TIMEOUT)
    if not slots:
        raise ClusterError(f"Ray at {address}: no node has a GPU or a processor slot")
    return cluster_of(
        ((node, Accelerator(**accelerator), None) for node, accelerator, _ in slots),
        cores_per_node=max(cores for _, _, cores in slots),
    )


def check_address(address: str) -> None:
    """Raise ConfigError of `cluster.address` where no Ray answers there.

    For a run, before it joins: where something else listens, `ray.init` waits for two minutes and ends the process.
    """
    try:
        _ask(address, JOIN_TIMEOUT)
    except ClusterError as error:
        raise ConfigError("cluster.address", str(error)) from None


def _ask(address: str, timeout: timedelta) -> list[Any]:
    """[node, accelerator, processor cores of the node] of each slot of a running Ray; raises ClusterError."""
    _check_listens(address)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_RAY, address], capture_output=True, text=True, timeout=timeout.total_seconds()
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Ray at {address}: no answer in {timeout.total_seconds():g} s; is it Ray?") from None
    return _slots(done.stdout, address)


def _slots(printed: str, address: str) -> list[Any]:
    """The answer is the last line: Ray may print before it."""
    answer = json.loads((printed.strip().splitlines() or ["{}"])[-1])
    if "slots" not in answer:
        raise ClusterError(f"Ray at {address} cannot be used: {answer.get('error', 'its client ended')}")
    slots: list[Any] = answer["slots"]
    return slots


def _check_listens(address: str) -> None:
    """Raise ClusterError where an address names a port at which nothing listens."""
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if not match:
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=CONNECT_TIMEOUT.total_seconds()).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"Ray at {address}: nothing answers ({error})") from None
