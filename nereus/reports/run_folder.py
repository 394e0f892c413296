"""The folder of one run: what belongs to it, who may write there, and its two files of lines.

A run holds the folder's lock as long as its process lives; a process that died holds none. What an earlier run left is
never written over without being asked for. What cannot be written (a full disk) is told once and costs its line, not
the run.
"""

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from nereus.errors import ConfigError
from nereus.reports.control import STATUS, Status
from nereus.reports.events import Event, Start

LOCK = "run.lock"
LINES = ("metrics.jsonl", "events.jsonl")
OWNED = (*LINES, "config.yaml", STATUS, "control", "checkpoints", "hf", "report.html")
"""What a run writes into its folder, and the next one takes away where it may."""

EVIDENCE = ("events.jsonl", "metrics.jsonl", "checkpoints", "hf")
"""What shows that a run has begun here; one that failed before has left nothing to lose."""


class RunFolder:
    """Writes the files of one run. Lines are flushed as they come, so a crash loses none."""

    def __init__(self, folder: Path, *, tell: Callable[[str], None] | None = None) -> None:
        """tell: told in one line of a file that cannot be written, once each."""
        self.folder = folder
        self._tell = tell
        self._lock: TextIO | None = None
        self._files: dict[str, TextIO] = {}
        self._failed: set[str] = set()
        self._started = time.monotonic()

    def open(self, config_text: str, *, overwrite: bool = False) -> None:
        """Take the folder for this run. Its files of lines appear with their first line.

        Raises ConfigError where another run has it, where an earlier one left its files and `overwrite` is not given,
        and where it cannot be written at all.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
            self._clear(overwrite)
            (self.folder / "config.yaml").write_text(config_text, encoding="utf-8")
        except OSError as error:
            self.close()
            raise ConfigError("run.dir", f"{self.folder} cannot be written: {error.strerror}") from None
        except ConfigError:
            self.close()
            raise

    def elapsed_s(self) -> float:
        """Seconds since the run's first event."""
        return time.monotonic() - self._started

    def event(self, event: Event) -> None:
        """Append an event."""
        if isinstance(event, Start):
            self._started = time.monotonic()
        head = {"type": event.type, "step": event.step, "time_s": self.elapsed_s()}
        self._line("events.jsonl", head | event.fields())

    def metrics(self, row: Mapping[str, float]) -> None:
        """Append a row of numbers."""
        self._line("metrics.jsonl", row)

    def status(self, status: Status) -> None:
        """Say where the run is."""
        self._attempt(STATUS, lambda: status.write(self.folder))

    def close(self) -> None:
        """Give the folder back; may be called twice."""
        for name, file in self._files.items():
            self._attempt(name, file.close)
        self._files.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        lock = (self.folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise ConfigError(
                "run.dir", f"{self.folder} belongs to a run that goes on (process {owner}); name another folder"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _clear(self, overwrite: bool) -> None:
        left = [name for name in EVIDENCE if _holds_something(self.folder / name)]
        if left and not overwrite:
            names = ", ".join(left)
            raise ConfigError(
                "run.dir",
                f"{self.folder} holds an earlier run ({names}); give run.overwrite=true to replace it, or name "
                "another folder",
            )
        for path in (self.folder / name for name in OWNED):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()

    def _line(self, name: str, fields: Mapping[str, Any]) -> None:
        def write() -> None:
            if name not in self._files:
                self._files[name] = (self.folder / name).open("a", encoding="utf-8")
            self._files[name].write(json.dumps(_finite(fields), allow_nan=False) + "\n")
            self._files[name].flush()

        self._attempt(name, write)

    def _attempt(self, name: str, act: Callable[[], object]) -> None:
        """Do what writes a file; where that fails it is told, once until it succeeds again."""
        try:
            act()
            self._failed.discard(name)
        except OSError as error:
            if name not in self._failed and self._tell is not None:
                self._tell(f"{self.folder / name} cannot be written ({error.strerror}); the run goes on without it")
            self._failed.add(name)


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _finite(value: Any) -> Any:
    """The value as JSON has it: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
