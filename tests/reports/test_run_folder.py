"""A run folder belongs to one run: what is there is kept, who writes holds its lock, a full disk costs lines only."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import Run, nereus, tiny

from nereus.errors import ConfigError
from nereus.plan import Plan
from nereus.reports.control import Status, started_ticks
from nereus.reports.events import read_lines
from nereus.reports.run_folder import RunFolder


def begun(folder: Path, *, overwrite: bool = False) -> RunFolder:
    run = RunFolder(folder)
    run.open("a: 1\n", overwrite=overwrite)
    return run


def test_a_folder_in_which_a_run_began_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.metrics({"step": 1.0})
    run.close()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-9").write_text("state")
    (tmp_path / "notes.txt").write_text("a person's own")
    with pytest.raises(ConfigError, match=r"run.dir: .*metrics.jsonl, checkpoints.*run.overwrite=true"):
        begun(tmp_path)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1.0}]
    begun(tmp_path, overwrite=True).close()
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "notes.txt").read_text() == "a person's own"


def test_a_run_that_failed_before_its_first_event_leaves_the_folder_free(tmp_path: Path) -> None:
    begun(tmp_path).close()
    begun(tmp_path).close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_a_run_that_goes_on_is_never_taken(tmp_path: Path, overwrite: bool) -> None:
    run = begun(tmp_path)
    with pytest.raises(ConfigError, match=f"goes on .process {os.getpid()}"):
        begun(tmp_path, overwrite=overwrite)
    run.close()
    begun(tmp_path, overwrite=overwrite).close()


def test_a_process_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from nereus.reports.run_folder import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1])); run.open(''); print('taken', flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "taken\n" and ended.returncode == -9
    begun(tmp_path).close()


def test_a_full_disk_is_told_once_and_costs_only_its_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    told: list[str] = []
    run = RunFolder(tmp_path, tell=told.append)
    run.open("")
    for step in range(3):
        run.metrics({"step": float(step)})
        run.status(Status(os.getpid(), "training", step, 3, None, time.time()))
    run.close()
    assert len(told) == 1 and "metrics.jsonl cannot be written (No space left on device)" in told[0]
    assert Status.read(tmp_path).step == 2


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.metrics({"a": math.nan, "b": math.inf, "c": 1.5})
    run.close()
    written = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(written, parse_constant=pytest.fail) == {"a": None, "b": None, "c": 1.5}


def test_another_process_of_the_same_id_is_not_the_run(tmp_path: Path) -> None:
    started = started_ticks(os.getpid())
    assert started is not None
    for own, alive in ((started, True), (started + 1, False)):
        assert Status(os.getpid(), "training", 1, 2, Plan(()), 0.0, own).alive is alive
    assert not Status(os.getpid(), "stopped", 1, 2, Plan(()), 0.0, started).alive


@pytest.mark.timeout(400)
def test_a_run_outlives_its_reader_and_its_disk_and_keeps_its_folder(tmp_path: Path) -> None:
    """Its rows go to a full disk, its output to a reader that leaves after three lines; others are refused."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    arguments = tiny(tmp_path, "trainer.steps=2", recipe="quickstart")
    run = Run(["train", *arguments], log=tmp_path / "output.txt", reader=["head", "-3"])
    try:
        deadline = time.monotonic() + 120
        while not (folder / "status.json").is_file():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert Status.read(folder).phase == "starting" and Status.read(folder).alive
        second = nereus("train", *arguments, folder=tmp_path)
        assert second.code == 2 and "belongs to a run that goes on" in second.output
        ended = run.wait(timeout_s=300)
        assert len((tmp_path / "output.txt").read_text().splitlines()) == 3
        assert Status.read(folder).phase == "done", ended.output
        steps = [line["step"] for line in read_lines(folder / "events.jsonl") if line["type"] == "step"]
        assert steps == [1, 2]
        third = nereus("train", *arguments, folder=tmp_path)
        assert third.code == 2 and "holds an earlier run" in third.output
    finally:
        run.end()
