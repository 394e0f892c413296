"""Runs a reward function in a few child processes, so that nothing it does can stop or slow down the run.

    score(samples) ── chunk ──> child 1 ── one result a sample ──┐
                   └─ chunk ──> child 2 ── one result a sample ──┴─> wait, until the earliest deadline
                                                                     │ late or dead: SIGKILL its process group,
                                                                     │ that sample scores 0, a new child takes the rest

A child reads a whole chunk before it answers and gets the next only when the last sample is answered, so neither side
ever waits for a full pipe. A deadline covers one sample: it starts when the chunk is sent and again at every answer.
"""

import collections
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from nereus.errors import DataError

__all__ = ["RewardBatch", "RewardPool", "RewardSample", "load_reward"]

WORKER = Path(__file__).with_name("reward_worker.py")
START_LIMIT = timedelta(seconds=60)
"""A child imports the function's module within this time."""
CHUNK = 32
"""Samples sent to a child at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to score; the fields are the arguments of `compute_score`."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class RewardBatch:
    """Scores in the order of the samples. Samples that raised or ran out of time are counted and score 0.

    first_problem: what came of the first of them, in a line; first_traceback: the same with where it was raised.
    """

    scores: tuple[float, ...]
    num_errors: int = 0
    num_timeouts: int = 0
    first_problem: str | None = None
    first_traceback: str | None = None


@dataclasses.dataclass(slots=True)
class _Child:
    """One child process and the samples it still owes."""

    process: subprocess.Popen[bytes]
    connection: "multiprocessing.connection.Connection[Any, Any]"
    owes: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    deadline: float = 0.0


@dataclasses.dataclass(slots=True)
class _Tally:
    """Results of a batch in the making."""

    scores: list[float]
    waiting: collections.deque[int]
    num_errors: int = 0
    num_timeouts: int = 0
    first_problem: str | None = None
    first_traceback: str | None = None

    def note(self, problem: str, traceback: str | None = None) -> None:
        if self.first_problem is None:
            self.first_problem, self.first_traceback = problem, traceback or problem

    @property
    def batch(self) -> RewardBatch:
        return RewardBatch(
            tuple(self.scores), self.num_errors, self.num_timeouts, self.first_problem, self.first_traceback
        )


def load_reward(function: str, *, timeout: timedelta, num_processes: int = 2) -> "RewardPool":
    """A pool whose function is known to import; raises DataError naming it and the reason."""
    pool = RewardPool(function, timeout=timeout, num_processes=num_processes)
    pool.start()
    return pool


class RewardPool:
    """Scores batches with `package.module:function` or `file.py:function`; close it, or use it in a `with`.

    `timeout` bounds one sample. Children are started when they are first needed.
    """

    def __init__(self, function: str, *, timeout: timedelta, num_processes: int = 2) -> None:
        module, colon, name = function.rpartition(":")
        if not colon or not module or not name.isidentifier():
            raise DataError(f"reward.function {function!r}: write package.module:function or file.py:function")
        if module.endswith(".py") and not os.path.isfile(module):
            raise DataError(f"reward.function {function!r}: no such file {module}")
        self.function = function
        self._module, self._name = module, name
        self._timeout_s = timeout.total_seconds()
        self._num_processes = num_processes
        self._children: list[_Child] = []

    def start(self) -> None:
        """Import the function in a first child; raises DataError where that fails."""
        if not self._children:
            self._children.append(self._new_child())

    def score(self, samples: Sequence[RewardSample]) -> RewardBatch:
        """Scores of samples, in order. What the function does never raises; a child that cannot start does."""
        tally = _Tally([0.0] * len(samples), collections.deque(range(len(samples))))
        wanted = min(self._num_processes, -(-len(samples) // CHUNK))
        for child in [child for child in self._children if child.connection.poll()]:
            _end(child)  # it says something without being asked: it has died since the last batch
            self._children.remove(child)
        while len(self._children) < wanted:
            self._children.append(self._new_child())
        while True:
            for child in [child for child in self._children if not child.owes and tally.waiting]:
                self._hand_out(child, samples, tally)
            busy = [child for child in self._children if child.owes]
            if not busy:
                return tally.batch
            self._collect(busy, tally)

    def close(self) -> None:
        """End every child and whatever it started."""
        for child in self._children:
            _end(child)
        self._children.clear()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hand_out(self, child: _Child, samples: Sequence[RewardSample], tally: _Tally) -> None:
        size = min(CHUNK, -(-len(tally.waiting) // self._num_processes))
        child.owes.extend(tally.waiting.popleft() for _ in range(size))
        child.deadline = time.monotonic() + self._timeout_s
        owed = (samples[index] for index in child.owes)
        try:
            child.connection.send([(s.data_source, s.solution_str, s.ground_truth, s.extra_info) for s in owed])
        except BrokenPipeError:
            pass  # it died just now; collecting finds the closed connection and replaces it

    def _collect(self, busy: Sequence[_Child], tally: _Tally) -> None:
        """Take what has arrived by the earliest deadline, then replace the children that are late or dead."""
        by_connection = {child.connection: child for child in busy}
        patience = max(0.0, min(child.deadline for child in busy) - time.monotonic())
        for ready in multiprocessing.connection.wait(list(by_connection), timeout=patience):
            child = by_connection[ready]  # type: ignore[index]
            try:
                score, problem = child.connection.recv()
            except (EOFError, ConnectionResetError):
                tally.num_errors += 1
                tally.note("the reward function ended its process")
                self._replace(child, tally)
                continue
            tally.scores[child.owes.popleft()] = score
            child.deadline = time.monotonic() + self._timeout_s
            if problem is not None:
                tally.num_errors += 1
                tally.note(*problem)
        for child in busy:
            if child.owes and time.monotonic() >= child.deadline and not child.connection.poll():
                tally.num_timeouts += 1
                tally.note(f"a sample took longer than {self._timeout_s:g} s")
                self._replace(child, tally)

    def _replace(self, child: _Child, tally: _Tally) -> None:
        """End a child; its current sample keeps score 0, the rest of its chunk waits again."""
        _end(child)
        child.owes.popleft()
        tally.waiting.extendleft(reversed(child.owes))
        child.owes.clear()
        self._children.remove(child)
        if tally.waiting and len(self._children) < self._num_processes:
            self._children.append(self._new_child())

    def _new_child(self) -> _Child:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the function prints must not mix with what a command prints
                start_new_session=True,
            )
        child = _Child(process, ours)
        ours.send((self._module, self._name, [*sys.path, os.getcwd()], self._timeout_s, START_LIMIT.total_seconds()))
        problem: str | None = f"importing it took longer than {START_LIMIT.total_seconds():g} s"
        try:
            if ours.poll(START_LIMIT.total_seconds()):
                problem = ours.recv()
        except (EOFError, ConnectionResetError):
            problem = "importing it ended the process"
        if problem is not None:
            _end(child)
            raise DataError(f"reward.function {self.function!r}: {problem}")
        return child


def _end(child: _Child) -> None:
    """Kill a child's process group. The child is not waited for before, so the group's id is still its own."""
    child.connection.close()
    os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
