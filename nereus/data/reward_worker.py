"""The child process of a reward pool: imports one function, then answers chunk after chunk, a result a sample.

Started by path with the number of an inherited descriptor, so that it imports nothing but the function's module. It
ends when the pool closes the connection; should the pool's process be gone while the function hangs, an alarm with the
default action ends it, even inside C code.
"""

import importlib
import importlib.util
import inspect
import math
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["find_function", "score_of"]

Score = Callable[..., Any]
ALARM_GRACE_S = 2.0
"""The alarm comes so much after the pool would have ended the child itself."""


def find_function(module: str, name: str) -> Score:
    """The callable `name` of a module or of a Python file; raises ImportError with a reason."""
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location("nereus_reward_file", module)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    function = getattr(loaded, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_"))
        raise ImportError(f"{module} has no function {name}; it has: {', '.join(functions) or 'none'}")
    return function  # type: ignore[no-any-return]


def score_of(result: Any) -> float:
    """The score in what a reward function returned; raises ValueError, TypeError or KeyError."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("the function is async; it must return its score")
    value = result["score"] if isinstance(result, Mapping) else result
    if value is None:
        raise TypeError("the function returned None; it must return a number or a dict with a score")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    return score


def _answer(function: Score, sample: tuple[Any, ...]) -> tuple[float, tuple[str, str] | None]:
    """The score and, where there is none, what was raised: in one line, and with its traceback."""
    data_source, solution_str, ground_truth, extra_info = sample
    try:
        result = function(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        return score_of(result), None
    except Exception as error:  # whatever a user's function raises is that sample's problem alone
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        return 0.0, (
            f"{type(error).__name__}: {error}",
            "".join(traceback.format_exception(type(error), error, own)).rstrip(),
        )


def serve(connection: "Connection[Any, Any]") -> None:
    """Import the named function, say how that went, then answer chunks until the connection closes."""
    module, name, path, timeout_s, start_limit_s = connection.recv()
    sys.path[:] = path
    signal.setitimer(signal.ITIMER_REAL, start_limit_s + ALARM_GRACE_S)
    try:
        function = find_function(module, name)
    except Exception as error:  # importing a user's module may raise anything; the pool reports it
        connection.send(f"it cannot be imported: {type(error).__name__}: {error}")
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    connection.send(None)
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        for sample in chunk:
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_GRACE_S)
            result = _answer(function, sample)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(result)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as pool:
        serve(pool)
