"""Runs on real Ray workers, each a `nereus train` of its own: to the end, interrupted, hurt, side by side, joined."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Run, command_line, descendants, nereus, shared_files, survivors, tiny

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny warm start, made by the first run and reused by the others."""
    return tmp_path_factory.mktemp("warm")


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def started(run: Run, text: str) -> set[int]:
    """The run's processes once it has printed `text`."""
    run.wait_for(text, timeout_s=170)
    return run.tree


def worker_processes(run: Run) -> list[int]:
    return sorted(pid for pid in run.tree if "_Actor" in command_line(pid))


def test_a_recipe_with_all_four_models_trains_and_moves_on_four_workers(tmp_path: Path, cache: Path) -> None:
    files = shared_files()
    transition = "transitions=[{step: 3, plan: {actor-training: d1t1p2@2-3, reward-inference: d2t1p1@0-1}}]"
    run = Run(
        ["train", *tiny(tmp_path, "warm_start.reward_steps=10", "trainer.critic_warmup=0", transition, cache=cache)],
        log=tmp_path / "output.txt",
    )
    tree = started(run, "step 1:")
    assert len(worker_processes(run)) == 4
    ended = run.wait()
    assert ended.code == 0, ended.output
    metrics, events = rows(tmp_path / "run" / "metrics.jsonl"), rows(tmp_path / "run" / "events.jsonl")
    steps = [row for row in metrics if "timing_s/step" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(
        f"timing_s/{name}" in steps[-1] for name in ("reward-inference", "reference-inference", "actor-training")
    )
    assert [row["plan_epoch"] for row in steps] == [0, 0, 1]
    assert all({"actor/pg_loss", "critic/vf_loss", "train/reward/mean"} <= row.keys() for row in steps)
    moves = [event for event in events if event["type"] == "transition"]
    assert len(moves) == 1 and moves[0]["verified"] and moves[0]["bytes_moved"] == moves[0]["bytes_lower_bound"]
    assert not survivors(tree) and shared_files() <= files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "number", "group"),
    [
        ("warm start: teaching", signal.SIGINT, True),
        ("starting Ray", signal.SIGINT, True),
        ("starting 4 workers", signal.SIGTERM, False),
        ("step 1:", signal.SIGINT, True),
        ("step 1:", signal.SIGTERM, False),
    ],
    ids=["warm start", "Ray's start", "workers' start", "a step", "a step, SIGTERM"],
)
def test_an_interrupted_run_ends_with_130_and_leaves_nothing(
    tmp_path: Path, cache: Path, text: str, number: signal.Signals, group: bool
) -> None:
    files = shared_files()
    reuse = None if text.startswith("warm") else cache
    run = Run(
        ["train", *tiny(tmp_path, "trainer.steps=200", recipe="quickstart", cache=reuse)], log=tmp_path / "output.txt"
    )
    started(run, text)
    time.sleep(0.3)
    tree = run.tree
    run.signal(number, group=group)
    ended = run.wait(timeout_s=30)
    assert ended.code == 130, ended.output
    assert ended.output.endswith("interrupted; everything that was started has ended\n"), ended.output
    assert "Traceback" not in ended.output
    assert not survivors(tree) and shared_files() <= files


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_worker_ends_the_run_with_its_device_and_task(
    tmp_path: Path, cache: Path, number: signal.Signals
) -> None:
    """A dead worker is known at once, one that does not answer when the groups' time is up."""
    timeout_s, files = 6, shared_files()
    plan = "plan={actor-generation: d1t4p1@0-3, reference-inference: d1t4p1@0-3, actor-training: d2t2p1@0-3, "
    plan += "critic-training: d1t2p2@0-3, critic-inference: d1t2p2@0-3}"
    run = Run(
        ["train", *tiny(tmp_path, "trainer.steps=500", f"cluster.timeout_s={timeout_s}", plan,
                        recipe="quickstart", cache=cache)],
        log=tmp_path / "output.txt",
    )  # fmt: skip
    started(run, "step 1:")
    tree, victim = run.tree, worker_processes(run)[1]
    os.kill(victim, number)
    ended = run.wait(timeout_s=60)
    assert ended.code == 1, ended.output
    message = ended.output.strip().splitlines()[-1]
    assert re.match(r"failed: worker \d, \S+", message), ended.output
    assert ended.seconds < timeout_s + 5 + 15, "the time-out, 5 s, and Ray's own end on a busy machine"
    assert "Traceback" not in ended.output
    assert not survivors(tree) and shared_files() <= files


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_runs_at_once_do_not_meet_and_a_folder_can_be_used_again(tmp_path: Path, cache: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    runs = []
    for folder in folders:
        folder.mkdir()
        runs.append(Run(["train", *tiny(folder, recipe="quickstart", cache=cache)], log=folder / "output.txt"))
    ends = [run.wait(timeout_s=300) for run in runs]
    assert [end.code for end in ends] == [0, 0], ends
    first, second = (rows(folder / "run" / "metrics.jsonl") for folder in folders)
    assert [row["train/reward/mean"] for row in first[-3:]] == [row["train/reward/mean"] for row in second[-3:]]
    again = nereus("train", *tiny(folders[0], "trainer.steps=1", recipe="quickstart", cache=cache), folder=folders[0])
    assert again.code == 0, again.output
    assert len([row for row in rows(folders[0] / "run" / "metrics.jsonl") if "timing_s/step" in row]) == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster with 2 slots that is not ours, kept by a process of its own; its address."""
    script = (
        "import sys\nfrom ray.cluster_utils import Cluster\n"
        "cluster = Cluster(True, head_node_args={'num_cpus': 2, 'include_dashboard': False})\n"
        "print(cluster.address, flush=True)\nsys.stdin.read()\ncluster.shutdown()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        address = keeper.stdout.readline().strip()
        assert re.fullmatch(r"[\d.]+:\d+", address), address
        yield address
        keeper.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["auto", "given"])
def test_a_run_joins_a_cluster_and_leaves_it_running(tmp_path: Path, cache: Path, cluster: str, address: str) -> None:
    plan = "plan={actor-generation: d2t1p1@0-1, reference-inference: d1t1p1@0, actor-training: d1t2p1@0-1, "
    plan += "critic-training: d1t1p2@0-1, critic-inference: d1t1p2@0-1}"
    where, environment = (cluster, {}) if address == "given" else ("auto", {"RAY_ADDRESS": cluster})
    ended = nereus(
        "train",
        *tiny(tmp_path, f"cluster.address={where}", "cluster.workers=2", "trainer.steps=2", plan,
              recipe="quickstart", cache=cache),
        folder=tmp_path,
        environment=environment,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert len([row for row in rows(tmp_path / "run" / "metrics.jsonl") if "timing_s/step" in row]) == 2
    assert not list((tmp_path / "run").glob(".seen*"))
    check = f"import ray; ray.init({cluster!r}, log_to_driver=False); assert ray.cluster_resources()['CPU'] == 2"
    assert subprocess.run([sys.executable, "-c", check], timeout=120).returncode == 0, "what was joined is left running"


@pytest.mark.slow
def test_code_reaches_the_workers_of_a_joined_cluster_through_the_runtime_environment(cluster: str) -> None:
    """In a process of its own: this one must not be connected to a cluster."""
    script = (
        "import ray, nereus\n"
        "from datetime import timedelta\n"
        "from nereus.runtime.ray_pool import RayPool, RaySettings\n"
        f"pool = RayPool(RaySettings(2, timedelta(seconds=30), address={cluster!r}))\n"
        "pool.connect()\n"
        "def where():\n    import sys\n    return [path for path in sys.path if 'py_modules' in path]\n"
        "print(ray.get(ray.remote(where).remote()))\n"
        "pool.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True)
    assert "py_modules_files" in ended.stdout.splitlines()[-1], ended.stdout


@pytest.mark.slow
def test_more_workers_than_a_joined_cluster_has_are_refused_with_what_each_node_has(
    tmp_path: Path, cache: Path, cluster: str
) -> None:
    run = Run(["train", *tiny(tmp_path, f"cluster.address={cluster}", recipe="quickstart", cache=cache)],
              log=tmp_path / "output.txt")  # fmt: skip
    run.wait_for("starting Ray")
    ended = run.wait(timeout_s=60)
    assert ended.code == 2 and ended.seconds < 10, ended
    assert re.search(r"error: .*devices are needed, 2 CPU slots are available \(\d[\d.]+: 2\)", ended.output)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace of its own")
def test_a_run_folder_that_a_node_does_not_see_is_refused(tmp_path: Path, cache: Path, cluster: str) -> None:
    """A second node whose file system shows an empty folder where the run writes."""
    script = 'mount -t tmpfs none "$0" && exec "$1" start --address="$2" --num-cpus=2 --block'
    with (tmp_path / "node.txt").open("wb") as log:
        node = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", script, str(tmp_path), RAY, cluster],
            stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip
    try:
        (tmp_path / "own").mkdir()
        time.sleep(5)
        arguments = tiny(
            tmp_path / "own", f"cluster.address={cluster}", "cluster.workers=4", recipe="quickstart", cache=cache
        )
        ended = nereus("train", *arguments, folder=tmp_path / "own")
    finally:
        tree = descendants(node.pid)
        node.terminate()
        node.wait(30)
        assert not survivors(tree, patience_s=10)
    assert ended.code == 2, ended.output
    assert re.search(r"error: \S+/run is not seen by [\d.]+; name a place that all nodes share", ended.output)
