"""Clusters as found: GPUs by the names their driver gives them, this machine, and a real Ray of several nodes."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs

import nereus
from nereus.cluster import ACCELERATORS, Cluster
from nereus.errors import ClusterError, ConfigError
from nereus.launch.discovery import accelerator_of, check_address, find_cluster, local_cluster
from nereus.launch.nvml import Gpu, local_gpus

MIB = 1 << 20

RAY = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(True, head_node_args={"num_cpus": 3, "num_gpus": 0, "include_dashboard": False})
for kind, gpus in [part.split(":") for part in sys.argv[1:]]:
    resources = {f"accelerator_type:{kind}": 1} if kind else {}
    cluster.add_node(num_cpus=2, num_gpus=int(gpus), resources=resources)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""Keeps a cluster whose nodes are given as `TYPE:GPUS` until its input ends."""


def running(*nodes: str) -> Iterator[str]:
    """The address of a Ray cluster with a head without GPUs and these nodes."""
    with subprocess.Popen(
        [sys.executable, "-c", RAY, *nodes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.fixture(scope="module")
def with_gpus() -> Iterator[str]:
    yield from running("H100:4", "A100:2", "A10G:1")


@pytest.fixture(scope="module")
def without_gpus() -> Iterator[str]:
    yield from running(":0")


@pytest.mark.parametrize(
    ("name", "mib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA H20", 97871, "h20"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA GH200 480GB", 97871, "gh200"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie"),
        ("NVIDIA A800-SXM4-80GB", 81920, "a800"),
        ("Tesla V100-SXM2-32GB", 32768, "v100"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA A10", 23028, "a10"),
        ("Tesla T4", 15360, "t4"),
    ],
)
def test_a_driver_s_name_means_a_known_type(name: str, mib: int, known: str) -> None:
    assert accelerator_of(Gpu(name, mib * MIB, has_nvlink=True)) == ACCELERATORS[known]


@pytest.mark.parametrize(
    ("gpu", "nearest"),
    [
        (Gpu("NVIDIA A10G", 23028 * MIB, has_nvlink=False), "a10"),
        (Gpu("NVIDIA A100-PCIE-40GB", 40960 * MIB, has_nvlink=False), "a100-40gb"),
        (Gpu("NVIDIA H100 NVL", 95830 * MIB, has_nvlink=True), "h100-96gb"),
        (Gpu("Tesla V100-SXM2-16GB", 16384 * MIB, has_nvlink=True), "v100"),
        (Gpu("NVIDIA GeForce RTX 4090", 24564 * MIB, has_nvlink=False, memory_bytes_per_s=1008e9), "a10"),
        (Gpu("NVIDIA RTX A6000", 49140 * MIB, has_nvlink=False, memory_bytes_per_s=768e9), "l40s"),
    ],
)
def test_an_unknown_gpu_is_what_its_driver_tells_and_the_nearest_known(gpu: Gpu, nearest: str) -> None:
    found, like = accelerator_of(gpu), ACCELERATORS[nearest]
    assert found.name not in ACCELERATORS and found.memory_bytes == gpu.memory_bytes
    assert found.flops_per_s == like.flops_per_s
    assert found.memory_bytes_per_s == (gpu.memory_bytes_per_s or like.memory_bytes_per_s)


def test_gpus_without_nvlink_talk_over_pcie() -> None:
    gpu = Gpu("NVIDIA A100-SXM4-80GB", 81920 * MIB, has_nvlink=False, pcie_bytes_per_s=16 * 1.969e9)
    assert accelerator_of(gpu).intra_node_bytes_per_s == 16 * 1.969e9
    slow = Gpu("NVIDIA L4", 23034 * MIB, has_nvlink=False, pcie_bytes_per_s=16 * 3.938e9)
    assert accelerator_of(slow) == ACCELERATORS["l4"]


@pytest.mark.skipif(bool(local_gpus()), reason="this machine has GPUs")
def test_a_machine_without_a_driver_has_a_worker_for_each_core() -> None:
    found = local_cluster()
    assert {device.accelerator for device in found.devices} == {"cpu"}
    assert found.cores_per_node == found.num_devices and len(found.nodes) == 1


def test_a_ray_cluster_has_its_nodes_gpus(with_gpus: str) -> None:
    found = find_cluster(f"ray:{with_gpus}")
    kinds = [[device.accelerator for device in node] for node in found.nodes.values()]
    assert sorted(kinds) == [["a100"] * 2, ["a10g"], ["h100"] * 4]
    assert found.cores_per_node is None and found.accelerator("h100") == ACCELERATORS["h100"]


def test_a_ray_cluster_without_gpus_has_a_worker_for_each_processor_slot(without_gpus: str) -> None:
    found = find_cluster(f"ray:{without_gpus}")
    assert sorted(len(node) for node in found.nodes.values()) == [2, 3]
    assert {device.accelerator for device in found.devices} == {"cpu"} and found.cores_per_node == 3


def test_planning_on_a_running_ray_loads_neither_ray_nor_torch(with_gpus: str) -> None:
    code = (
        "import re, sys, nereus\n"
        f"found = nereus.plan('llama-3.2-1b', 'ray:{with_gpus}', algorithm='grpo', batch=8, prompt=64, response=64)\n"
        "assert found.feasible and found.problem.cluster.num_devices == 7\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 * 1024


def test_an_address_at_which_nothing_listens_is_refused_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(ClusterError, match="nothing answers"):
        find_cluster("ray:127.0.0.1:1")
    with pytest.raises(ClusterError, match="nothing answers"):
        find_cluster("ray://127.0.0.1:1")
    assert time.monotonic() - started < 5


def test_what_listens_and_is_not_ray_is_given_up() -> None:
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ClusterError, match="is it Ray") as error:
        find_cluster(f"ray:127.0.0.1:{server.getsockname()[1]}")
    assert time.monotonic() - started < 30 and "\n" not in str(error.value)


def test_python_takes_a_cluster_as_written_as_found_or_as_a_value() -> None:
    job = dict(algorithm="grpo", batch=8, prompt=64, response=64)
    written = nereus.plan("llama-3.2-1b", "1x2xh100", **job)
    value = nereus.plan("llama-3.2-1b", find_cluster("1x2xh100"), **job)
    assert written.plan == value.plan
    assert isinstance(nereus.plan("llama-3.2-1b", "local", **job).problem.cluster, Cluster)


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_run_with_a_wrong_address_ends_within_seconds_and_names_the_key(tmp_path: Path, form: str) -> None:
    address = form.format("127.0.0.1:1")
    ended = runs.nereus("train", *runs.tiny(tmp_path, f"cluster.address={address}"), folder=tmp_path)
    last = ended.output.splitlines()[-1]
    assert ended.code == 2 and last.startswith(f"error: cluster.address: Ray at {address}: nothing answers"), ended
    assert "Traceback" not in ended.output and "warm start" not in ended.output
    assert ended.seconds < 30, "loading the libraries on a busy machine"


@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1:1", "nothing answers"), ("nowhere.invalid:6379", "nothing answers"), ("6379", "Invalid address")],
)
def test_an_address_that_no_run_can_join_is_named_in_one_line(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^cluster.address: Ray at {address}.*{problem}") as error:
        check_address(address)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_auto_finds_the_ray_that_runs_or_says_that_none_does(
    without_gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", without_gpus)
    check_address("auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ConfigError, match="^cluster.address: Ray at auto: no answer in 30 s"):
            check_address("auto")


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`nereus plan` in a process of its own."""
    code = "import sys; from nereus.cli import main; sys.argv[0] = 'nereus'; main()"
    line = [sys.executable, "-c", code, "plan", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_the_command_says_in_one_line_that_no_ray_runs() -> None:
    done = command("--model", "llama-3.2-1b", "--cluster", "ray:127.0.0.1:1")
    assert done.returncode == 2 and done.stderr.startswith("error: Ray at 127.0.0.1:1: nothing answers")
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_the_command_plans_on_what_this_machine_has() -> None:
    job = "--model qwen2.5-0.5b --cluster local --algorithm grpo --batch 2 --prompt 16 --response 16 --json -"
    done = command(*job.split())
    assert done.returncode in (0, 1), done.stderr  # four gigabytes a worker may be too few
    assert json.loads(done.stdout)["feasible"] is (done.returncode == 0)


def test_a_process_held_to_one_core_finds_one() -> None:
    """`--cluster local` counts what the process may use, not what the machine has."""
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from nereus.launch.discovery import local_cluster, usable_cores\n"
        "print(usable_cores(), local_cluster().cores_per_node)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["1", "1"]
