"""What time it is in a run, and letting it pass: real seconds, or those of a simulation."""

import abc
import time


class Clock(abc.ABC):
    """Time of one run. A simulator advances its own clock while steps and transitions run on it."""

    @property
    @abc.abstractmethod
    def now_s(self) -> float:
        """Seconds since the run started."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when so many seconds have passed."""


class WallClock(Clock):
    """Real time since this clock was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._started

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
