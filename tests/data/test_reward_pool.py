import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from nereus.data.reward_pool import RewardPool, RewardSample, load_reward
from nereus.errors import DataError

FUNCTIONS = """
import ctypes, os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise KeyError("nothing here")
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "kill parent and loop":
        os.kill(os.getppid(), 9)
        while True:
            pass
    if solution_str == "sleep in C":
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "sys.exit":
        sys.exit(0)
    if solution_str == "grandchild":
        child = subprocess.Popen(["sleep", "600"])
        open(ground_truth, "w").write(str(child.pid))
        return 1.0
    if solution_str == "pid":
        return float(os.getpid())
    if solution_str == "print":
        print("printed by the function")
        return 1.0
    if solution_str == "none":
        return None
    if solution_str == "nan":
        return float("nan")
    if solution_str == "dict":
        return {"score": 0.25, "note": "x"}
    return float(solution_str == ground_truth) + (extra_info or {}).get("bonus", 0.0)

not_a_function = 3
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(functions: Path) -> Iterator[RewardPool]:
    with load_reward(f"{functions}:compute_score", timeout=timedelta(seconds=0.4)) as pool:
        yield pool


def samples(*solutions: str, truth: str = "a") -> list[RewardSample]:
    return [RewardSample("task", solution, truth) for solution in solutions]


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_scores_come_back_in_the_order_of_the_samples(pool: RewardPool) -> None:
    batch = pool.score([RewardSample("task", str(i), "7", {"bonus": i / 1000}) for i in range(300)])
    assert batch.scores == tuple(float(i == 7) + i / 1000 for i in range(300))
    assert (batch.num_errors, batch.num_timeouts, batch.first_problem) == (0, 0, None)


def test_an_empty_batch_has_no_scores(pool: RewardPool) -> None:
    assert pool.score([]).scores == ()


def test_a_dict_with_a_score_counts_as_that_score(pool: RewardPool) -> None:
    assert pool.score(samples("dict")).scores == (0.25,)


def test_an_exception_is_counted_and_scores_nothing(pool: RewardPool) -> None:
    batch = pool.score(samples("a", "raise", "none", "nan", "a"))
    assert batch.scores == (1.0, 0.0, 0.0, 0.0, 1.0)
    assert batch.num_errors == 3 and batch.num_timeouts == 0
    assert batch.first_problem == "KeyError: 'nothing here'"


@pytest.mark.parametrize("hang", ["loop", "sleep in C"])
def test_a_function_that_hangs_is_stopped_and_the_rest_is_scored(pool: RewardPool, hang: str) -> None:
    pool.score(samples("a"))
    began = time.monotonic()
    batch = pool.score(samples(*["a"] * 40, hang, *["a"] * 40, hang, *["a"] * 40))
    assert time.monotonic() - began < 8
    assert batch.num_timeouts == 2 and batch.num_errors == 0
    assert batch.scores == (*[1.0] * 40, 0.0, *[1.0] * 40, 0.0, *[1.0] * 40)
    assert batch.first_problem == "a sample took longer than 0.4 s"


@pytest.mark.parametrize("end", ["exit", "sys.exit"])
def test_a_function_that_ends_its_process_is_counted_and_the_rest_is_scored(pool: RewardPool, end: str) -> None:
    batch = pool.score(samples("a", end, "a", "a"))
    assert batch.scores == (1.0, 0.0, 1.0, 1.0)
    assert batch.num_errors == 1 and batch.first_problem == "the reward function ended its process"


def test_slow_samples_within_the_limit_do_not_add_up_to_a_time_out(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef score(**kwargs):\n    time.sleep(0.15)\n    return 1.0\n")
    with load_reward(f"{path}:score", timeout=timedelta(seconds=1)) as pool:
        batch = pool.score(samples(*["a"] * 20))
    assert batch.scores == (1.0,) * 20 and batch.num_timeouts == 0


def test_closing_the_pool_ends_its_children_and_what_they_started(functions: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with load_reward(f"{functions}:compute_score", timeout=timedelta(seconds=5)) as pool:
        child = int(pool.score(samples("pid")).scores[0])
        pool.score(samples("grandchild", truth=str(note)))
        assert alive(child)
    assert gone_within(child, 5) and gone_within(int(note.read_text()), 5)


ORPHAN = """
import os, sys
from datetime import timedelta
from nereus.data.reward_pool import RewardSample, load_reward

pool = load_reward(sys.argv[1] + ":compute_score", timeout=timedelta(seconds=0.5), num_processes=1)
print(int(pool.score([RewardSample("task", "pid", "")]).scores[0]), flush=True)
if sys.argv[2] == "idle":
    os.kill(os.getpid(), 9)
pool.score([RewardSample("task", "kill parent and loop", "")])
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_child_does_not_outlive_a_run_that_was_killed(state: str, functions: Path) -> None:
    run = subprocess.run([sys.executable, "-c", ORPHAN, functions, state], stdout=subprocess.PIPE, timeout=60)
    assert run.returncode == -9
    assert gone_within(int(run.stdout), 10)


def test_a_pool_can_be_used_again_after_it_was_closed(functions: Path) -> None:
    pool = RewardPool(f"{functions}:compute_score", timeout=timedelta(seconds=5))
    assert pool.score(samples("a")).scores == (1.0,)
    pool.close()
    assert pool.score(samples("a")).scores == (1.0,)
    pool.close()


def test_a_child_that_died_between_batches_is_replaced(pool: RewardPool) -> None:
    child = int(pool.score(samples("pid")).scores[0])
    os.kill(child, 9)
    assert gone_within(child, 5)
    batch = pool.score(samples(*["a"] * 8))
    assert sum(batch.scores) == 8.0 and batch.num_errors == 0


def test_what_a_function_prints_does_not_reach_standard_output(
    pool: RewardPool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool.score(samples("print"))
    pool.close()
    assert "printed by the function" not in capfd.readouterr().out


def test_a_shipped_function_is_found_by_module_name() -> None:
    with load_reward("nereus.data.rewards:exact_answer", timeout=timedelta(seconds=5)) as pool:
        assert pool.score(samples("#### 3", "#### 4", truth="4")).scores == (0.0, 1.0)


def test_a_step_of_256_samples_costs_milliseconds() -> None:
    with load_reward("nereus.data.rewards:exact_answer", timeout=timedelta(seconds=5)) as pool:
        batch = samples(*["7 - 8 = -1\n#### -1"] * 256, truth="-1")
        pool.score(batch)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            assert sum(pool.score(batch).scores) == 256
            times.append(time.perf_counter() - began)
    assert min(times) < 0.1, times


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("nereus.data.rewards:exact", "has no function exact; it has: .*exact_answer"),
        ("nowhere.py:f", "no such file nowhere.py"),
        ("just_a_name", "write package.module:function or file.py:function"),
        ("{functions}:not_a_function", "has no function not_a_function; it has: compute_score"),
        ("{broken}:f", "SyntaxError"),
        ("{exits}:f", "ended the process"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(name: str, says: str, functions: Path, tmp_path: Path) -> None:
    broken, exits = tmp_path / "broken.py", tmp_path / "exits.py"
    broken.write_text("def f(:\n")
    exits.write_text("import sys\nsys.exit(1)\n")
    with pytest.raises(DataError, match=f"reward.function .*{says}"):
        load_reward(name.format(functions=functions, broken=broken, exits=exits), timeout=timedelta(seconds=5))
