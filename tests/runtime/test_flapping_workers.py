"""Workers that really start and end under a flapping supply change no result and leave nothing behind."""

import json
import time
from pathlib import Path

import pytest
from runs import Run, nereus, shared_files, survivors, tiny

NUM_STEPS = 40
TRACE = "time_s,devices\n0,4\n2,2\n4,6\n6,0\n13,5\n15,3\n18,6\n22,2\n26,4\n30,2\n34,5\n38,3\n"
"""None at all for seven seconds, which no step lasts."""
MEASURED = ("timing_s/", "perf/", "plan_epoch")


def arguments(folder: Path, cache: Path, *overrides: str) -> list[str]:
    return tiny(
        folder, f"trainer.steps={NUM_STEPS}", "trainer.critic_warmup=0", "trainer.dtype=fp64", *overrides,
        recipe="quickstart", cache=cache,
    )  # fmt: skip


def rows(run: Path) -> list[dict[str, float]]:
    """What each step computed, without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in steps]


def open_files(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_workers_that_come_and_go_change_nothing_and_leave_nothing(tmp_path: Path) -> None:
    for name in ("still", "flapping"):
        (tmp_path / name).mkdir()
    still = nereus("train", *arguments(tmp_path / "still", tmp_path / "cache"), folder=tmp_path, timeout_s=600)
    assert still.code == 0, still.output

    trace = tmp_path / "supply.csv"
    trace.write_text(TRACE)
    files = shared_files()
    run = Run(
        ["train", *arguments(tmp_path / "flapping", tmp_path / "cache", "adapt=true", f"supply.trace={trace}")],
        log=tmp_path / "flapping.txt",
    )
    seen: set[int] = set()
    opened: list[int] = []
    try:
        run.wait_for("step 1:", timeout_s=600)
        while run.process.poll() is None:
            seen |= run.tree
            if f"step {NUM_STEPS}:" not in run.output:
                opened.append(open_files(run.process.pid))
            time.sleep(0.2)
        ended = run.wait()
    finally:
        run.end()
    assert ended.code == 0, ended.output
    assert not survivors(seen) and shared_files() <= files
    assert max(opened[len(opened) // 2 :]) <= max(opened[: len(opened) // 2]) + 20, opened

    events = [json.loads(line) for line in (tmp_path / "flapping/run/events.jsonl").read_text().splitlines()]
    moves = [event["mode"] for event in events if event["type"] == "transition"]
    assert len(moves) >= 3 and moves.count("restart") == 1, moves
    expected, found = rows(tmp_path / "still" / "run"), rows(tmp_path / "flapping" / "run")
    assert len(expected) == len(found) == NUM_STEPS
    for step, (before, after) in enumerate(zip(expected, found, strict=True), start=1):
        assert after == pytest.approx(before, rel=1e-9 if step <= 20 else 1e-4, abs=1e-9 if step <= 20 else 1e-4)
    print(f"moves: {moves}; processes: {len(seen)}; open files: {opened[0]} to {opened[-1]}, at most {max(opened)}")
