"""What the NVIDIA driver says of this machine's GPUs, through NVML. No CUDA context is made."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver reports it.

    memory_bytes_per_s, pcie_bytes_per_s: peaks, the latter in one direction; None where the driver does not say.
    """

    name: str
    memory_bytes: int
    has_nvlink: bool
    memory_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None


PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one lane in one direction, by PCIe generation, after line coding."""


def local_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine in the driver's order; none where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    import pynvml

    bus_bits = _told(pynvml.nvmlDeviceGetMemoryBusWidth, handle)
    clock_mhz = _told(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    generation = _told(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _told(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    lane_bytes_per_s = PCIE_LANE_BYTES_PER_S.get(generation or 0)
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        has_nvlink=any(
            _told(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
        ),
        memory_bytes_per_s=2 * clock_mhz * 1e6 * bus_bits / 8 if bus_bits and clock_mhz else None,
        pcie_bytes_per_s=lane_bytes_per_s * lanes if lane_bytes_per_s and lanes else None,
    )


def _told(query: Callable[..., int], *args: object) -> int | None:
    """The driver's answer, or None where it has none for this GPU."""
    import pynvml

    try:
        return query(*args)
    except pynvml.NVMLError:
        return None
