"""How much memory a worker holds, and the limit it must not pass.

On a processor: bytes the C heap has handed out (glibc's `mallinfo2`) beyond those of the idle process, plus the shared
segments that state lives in. On CUDA: what torch's allocator holds. Sampled where memory peaks, at the end of each
forward pass, not continuously.
"""

import ctypes
import ctypes.util
import functools
from collections.abc import Callable

import torch

from nereus.errors import DeviceMemoryError


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, all fields size_t."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def _mallinfo2() -> Callable[[], _MallInfo2] | None:
    """The C library's function, or None where it has none."""
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    function: Callable[[], _MallInfo2] | None = getattr(library, "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo2  # type: ignore[attr-defined]
    return function


def heap_bytes() -> int:
    """Bytes the process has allocated from the C heap and not freed; 0 where the C library does not say."""
    function = _mallinfo2()
    if function is None:
        return 0
    info = function()
    return int(info.uordblks + info.hblkhd)


class MemoryGauge:
    """Peak bytes of one worker since the last `drain`. `shared_bytes`: what its state takes outside the heap."""

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int | None,
        shared_bytes: Callable[[], int],
        owns_process: bool = True,
    ) -> None:
        """owns_process: the worker is alone in its process; else the heap is everyone's and only state is counted."""
        self._device, self._limit_bytes, self._shared_bytes = device, limit_bytes, shared_bytes
        self._heap_bytes = heap_bytes if owns_process else lambda: 0
        self._idle_bytes = self._heap_bytes()
        self._peak_bytes = 0

    def current(self) -> int:
        """Bytes held now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, self._heap_bytes() - self._idle_bytes) + self._shared_bytes()

    def beside_state(self) -> int:
        """Bytes held now that are no unit's state: gradients, key-value caches, models' buffers."""
        if self._device.type == "cuda":
            return max(0, torch.cuda.memory_allocated(self._device) - self._shared_bytes())
        return max(0, self._heap_bytes() - self._idle_bytes)

    def sample(self) -> None:
        """Note what is held now; raises DeviceMemoryError where it passes the limit."""
        self.check(self.note())

    def note(self) -> int:
        """Note what is held now, and return it."""
        held = self.current()
        self._peak_bytes = max(self._peak_bytes, held)
        return held

    def check(self, held: int) -> None:
        """Raises DeviceMemoryError where so many bytes pass the limit."""
        if self._limit_bytes is not None and held > self._limit_bytes:
            raise DeviceMemoryError(held, self._limit_bytes)

    def drain(self) -> int:
        """The peak, which starts again from what is held now."""
        peak, self._peak_bytes = max(self._peak_bytes, self.current()), 0
        return peak
