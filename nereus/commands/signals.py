"""How a command ends when it is told to: SIGTERM is an interrupt."""

import signal
from types import FrameType


def end_cleanly_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, so that what was started is ended."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
