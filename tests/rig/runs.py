"""`nereus train` as a process of its own, on a recipe small enough for seconds, and what must not outlive it."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
NOTHING: Mapping[str, str] = {}
SHAPE = "{hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn: 40, max_positions: 128}"


def tiny(folder: Path, *overrides: str, recipe: str = "reward_model", cache: Path | None = None) -> list[str]:
    """Arguments of `nereus train` for a shipped recipe made tiny, its plan left alone; runs in `folder`."""
    keys = yaml.safe_load((REPOSITORY / "recipes" / f"{recipe}.yaml").read_text())
    kept = {key: value for key, value in keys.items() if key not in ("adapt", "supply", "transitions", "triggers")}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(kept))
    return [
        str(path),
        f"model.shape={SHAPE}",
        "data.train.size=200",
        "data.val.size=40",
        "data.train_batch_size=8",
        "rollout.n=2",
        "actor.ppo_mini_batch_size=4",
        "warm_start.steps=20",
        "warm_start.batch=16",
        f"warm_start.cache={cache or folder / 'cache'}",
        "trainer.steps=3",
        "trainer.val_every=0",
        "trainer.val_samples=8",
        f"run.dir={folder / 'run'}",
        *overrides,
    ]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    output: str
    seconds: float


class Run:
    """One `nereus` command in a session of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] = NOTHING,
        reader: Sequence[str] | None = None,
    ) -> None:
        """reader: a command that the output is piped to, whose own output goes to the log (`head -3`)."""
        self._log, self._begun, self._reader = log, time.monotonic(), None
        with contextlib.ExitStack() as files:
            output: Any = files.enter_context(log.open("wb"))
            if reader is not None:
                self._reader = subprocess.Popen(reader, stdin=subprocess.PIPE, stdout=output)
                output = files.enter_context(self._reader.stdin)  # type: ignore[arg-type]
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("nereus")), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, *, timeout_s: float = 120.0) -> None:
        """Return when the run has printed `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            code = self.process.poll()
            assert code is None or text in self.output, f"ended with {code} without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_s:g} s:\n{self.output}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals, *, group: bool) -> None:
        """As a terminal (the whole group) or `kill` (the process) does it."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, *, timeout_s: float = 150.0) -> Ended:
        begun = time.monotonic()
        try:
            self.process.wait(timeout_s)
        finally:
            self.end()
        return Ended(self.process.returncode, self.output, time.monotonic() - begun)

    def end(self) -> None:
        """Kill what is left; a test has failed by then."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._reader is not None:
            self._reader.wait(10)

    @property
    def tree(self) -> set[int]:
        """Processes below this one now."""
        return descendants(self.process.pid)


def nereus(*arguments: str, folder: Path, timeout_s: float = 150.0, environment: Mapping[str, str] = NOTHING) -> Ended:
    """Run a command to its end."""
    return Run(arguments, log=folder / "output.txt", environment=environment).wait(timeout_s=timeout_s)


def descendants(root: int) -> set[int]:
    """Children of a process, theirs and so on."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, waiting = set[int](), [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def parents() -> dict[int, int]:
    """The parent of every process that is not a zombie."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = int(fields[1])
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def survivors(tree: set[int], *, patience_s: float = 3.0) -> list[str]:
    """Which processes of a tree are still there after a moment."""
    deadline = time.monotonic() + patience_s
    while (left := tree & parents().keys()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{pid} {command_line(pid)[:120]}" for pid in left]


def shared_files() -> set[str]:
    """Names in /dev/shm that a Ray or a worker of this machine may have left."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}
