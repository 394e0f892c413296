"""One rank's shards of one unit, as flat buffers. What loads, moves, reduces and updates all act on.

Every kind of state (parameters, fp32 masters, Adam moments) is one flat tensor with the element offsets of
`boxes.shards`, so a whole unit rank is a few contiguous pieces: an optimizer update is a few vector operations, a
gradient reduction is one collective, and copying a replica is one copy per kind. Parameters of a layer that are
computed together (q, k, v; gate, up) are adjacent, so the fused matrix is a view as well.

The learning-rate schedule and the sampling noise are functions of the counters, so the counters are all there is
besides the tensors.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from nereus.model import ModelSpec
from nereus.plan import Layout
from nereus.shards.boxes import Shard, flat_numel, shard_table, shards
from nereus.shards.moves import Run


class StateKind(enum.StrEnum):
    """A flat buffer of a unit rank."""

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


Allocator = Callable[[int, torch.dtype], torch.Tensor]
"""(number of elements, dtype) -> zeroed flat tensor on the worker's device."""


TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""By the words of `engine_facts.PRECISIONS`."""


def state_dtypes(dtype: torch.dtype, *, trains: bool) -> dict[StateKind, torch.dtype]:
    """The kinds a unit rank holds and their dtypes: moments (and masters under bf16) only where it trains."""
    kinds = {StateKind.PARAM: dtype}
    if trains:
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        if wide != dtype:
            kinds[StateKind.MASTER] = wide
        kinds |= {StateKind.EXP_AVG: wide, StateKind.EXP_AVG_SQ: wide}
    return kinds


def zeros_on(device: torch.device) -> Allocator:
    """An allocator of private memory on a device."""
    return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """`updates`: optimizer updates applied; `version`: policy version of the parameters."""

    updates: int = 0
    version: int = 0


@dataclasses.dataclass(slots=True)
class RankState:
    """Flat buffers of one rank of one unit. `flats[kind]` has shape [flat_numel]."""

    spec: ModelSpec
    layout: Layout
    rank: int
    flats: dict[StateKind, torch.Tensor]
    counters: Counters = dataclasses.field(default_factory=Counters)

    @classmethod
    def allocate(
        cls, spec: ModelSpec, layout: Layout, rank: int, *, dtypes: dict[StateKind, torch.dtype], allocator: Allocator
    ) -> "RankState":
        numel = flat_numel(spec, layout, rank)
        return cls(spec, layout, rank, {kind: allocator(numel, dtype) for kind, dtype in dtypes.items()})

    @property
    def shards(self) -> tuple[Shard, ...]:
        return shards(self.spec, self.layout, self.rank)

    def shard(self, name: str) -> Shard:
        return shard_table(self.spec, self.layout, self.rank)[name]

    def __contains__(self, name: str) -> bool:
        return name in shard_table(self.spec, self.layout, self.rank)

    def view(self, name: str, kind: StateKind = StateKind.PARAM) -> torch.Tensor:
        """The rank's box of a logical parameter, shaped as the box; writes go to the flat buffer."""
        return shard_view(self.flats[kind], self.shard(name))

    def fused(self, names: Iterable[str], kind: StateKind = StateKind.PARAM) -> torch.Tensor:
        """Adjacent shards as one tensor, stacked on dim 0."""
        return fused_view(self.flats[kind], [self.shard(name) for name in names])


def shard_view(flat: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A shard's box as a view of a flat tensor."""
    return flat.narrow(0, shard.offset, shard.box.numel).view(shard.box.shape)


def fused_view(flat: torch.Tensor, fused: list[Shard]) -> torch.Tensor:
    """Adjacent shards of a flat tensor as one view, stacked on dim 0."""
    first, rows = fused[0], sum(shard.box.shape[0] for shard in fused)
    numel = sum(shard.box.numel for shard in fused)
    assert fused[-1].offset + fused[-1].box.numel == first.offset + numel, (
        f"{first.param.name}: shards are not adjacent"
    )
    return flat.narrow(0, first.offset, numel).view(rows, *first.box.shape[1:])


Side = Literal["source", "target"]


def strided(flat: torch.Tensor, run: Run, side: Side) -> torch.Tensor:
    """The [rows, row_numel] view of a run in the flat tensor of one side."""
    offset, stride = (
        (run.source_offset, run.source_stride) if side == "source" else (run.target_offset, run.target_stride)
    )
    return flat.as_strided((run.rows, run.row_numel), (stride or run.row_numel, 1), offset)
