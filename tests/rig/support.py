"""Runs several ranks as threads of one process, each with its own client of one store."""

import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nereus.comm.store import KeyValueStore, connect_store, serve_store

StoreFactory = Callable[[], KeyValueStore]


def run_threads(num_ranks: int, fn: Callable[[int, StoreFactory], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """[fn(rank, store_factory) for each rank], run at once; the first error of a rank is raised.

    A rank still running after `timeout_s` fails the test with the stacks of all ranks.
    """
    server = serve_store()
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []

    def client() -> KeyValueStore:
        return connect_store(server.host, server.port, timeout=timedelta(seconds=timeout_s))

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank, client)
        except BaseException as error:
            errors.append((rank, error))

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        if errors:
            break
    stuck = [thread for thread in threads if thread.is_alive() and not errors]
    if stuck:
        raise TimeoutError(f"after {timeout_s:g} s still running:\n" + "\n".join(map(_stack, stuck)))
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised by rank {rank} of {num_ranks}")
        raise error
    return results


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}:\n" + ("".join(traceback.format_stack(frame)) if frame else "ended")
