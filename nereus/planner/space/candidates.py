"""The ways one model-stage can run, as parallel arrays: what each costs, needs and holds.

A row is a choice of layout, dp, micro-batch and recomputation on one kind of block (`Region`). The arrays are what the
search filters and sorts; a `Candidate` is one row, taken out. Nothing here knows how rows were priced.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from nereus.plan import Layout, ModelStage, Recompute
from nereus.planner.space.arrays import Floats, Ints
from nereus.planner.space.regions import spans_nodes, type_of

RECOMPUTES = tuple(Recompute)


def packed(*columns: tuple[Ints, int]) -> Ints:
    """One number for each row of (column, bits) pairs, equal where all are; a column's values need at most its bits."""
    assert sum(bits for _, bits in columns) < 63, "a key and one bit more must fit a signed number of 64 bits"
    keys = np.zeros_like(columns[0][0])
    for column, bits in columns:
        assert column.max(initial=0) < 1 << bits, f"{int(column.max())} does not fit {bits} bits of a key"
        keys = (keys << bits) | column
    return keys


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a model-stage.

    wave_seconds: seconds in each wave of the workflow (zero where it has no task).
    active_bytes, idle_bytes: on its fullest device while its tasks run, and while those of others do.
    shared_active_bytes, shared_idle_bytes: the same where its role's training model-stage holds the parameters.
    grain: devices that must lie in one node: a tensor-parallel group, or a whole unit.
    region: index of the kind of block it was priced on.
    """

    layout: Layout
    dp: int
    micro_batch: int
    recompute: Recompute
    wave_seconds: tuple[float, ...]
    active_bytes: int
    idle_bytes: int
    shared_active_bytes: int
    shared_idle_bytes: int
    grain: int
    region: int = 0

    @property
    def num_devices(self) -> int:
        return self.layout.num_ranks * self.dp

    @property
    def num_groups(self) -> int:
        """Groups of `grain` devices, each of which must lie in one node."""
        return self.num_devices // self.grain

    @property
    def shape(self) -> str:
        return f"d{self.dp}{self.layout}"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """All candidates of one model-stage; `seconds` is [rows, waves], the others are [rows]."""

    model_stage: ModelStage
    tp: Ints
    pp: Ints
    dp: Ints
    grain: Ints
    micro_batch: Ints
    recompute: Ints
    region: Ints
    seconds: Floats
    active: Ints
    idle: Ints
    shared_active: Ints
    shared_idle: Ints

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_devices(self) -> Ints:
        return self.tp * self.pp * self.dp

    @property
    def total_seconds(self) -> Floats:
        total: Floats = self.seconds.sum(axis=1)
        return total

    @property
    def shape_keys(self) -> Ints:
        """A number for each layout, dp, grain and accelerator type: candidates with equal ones could share a block."""
        return packed((self.tp, 12), (self.pp, 12), (self.dp, 20), (self.grain, 12), (type_of(self.region), 6))

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Candidates":
        """The candidates at some rows, in that order."""
        columns = {f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self) if f.name != "model_stage"}
        return Candidates(self.model_stage, **columns)

    def __getitem__(self, row: int) -> Candidate:
        return Candidate(
            layout=Layout(tp=int(self.tp[row]), pp=int(self.pp[row])),
            dp=int(self.dp[row]),
            micro_batch=int(self.micro_batch[row]),
            recompute=RECOMPUTES[int(self.recompute[row])],
            wave_seconds=tuple(self.seconds[row].tolist()),
            active_bytes=int(self.active[row]),
            idle_bytes=int(self.idle[row]),
            shared_active_bytes=int(self.shared_active[row]),
            shared_idle_bytes=int(self.shared_idle[row]),
            grain=int(self.grain[row]),
            region=int(self.region[row]),
        )

    @classmethod
    def of(cls, model_stage: ModelStage, rows: Iterable[Candidate], *, num_waves: int) -> "Candidates":
        listed = list(rows)

        def ints(values: Iterable[int]) -> Ints:
            return np.array(list(values), dtype=np.int64)

        return cls(
            model_stage,
            tp=ints(c.layout.tp for c in listed),
            pp=ints(c.layout.pp for c in listed),
            dp=ints(c.dp for c in listed),
            grain=ints(c.grain for c in listed),
            micro_batch=ints(c.micro_batch for c in listed),
            recompute=ints(RECOMPUTES.index(c.recompute) for c in listed),
            region=ints(c.region for c in listed),
            seconds=np.array([c.wave_seconds for c in listed], dtype=np.float64).reshape(len(listed), num_waves),
            active=ints(c.active_bytes for c in listed),
            idle=ints(c.idle_bytes for c in listed),
            shared_active=ints(c.shared_active_bytes for c in listed),
            shared_idle=ints(c.shared_idle_bytes for c in listed),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Candidates"]) -> "Candidates":
        names = [f.name for f in dataclasses.fields(cls) if f.name != "model_stage"]
        return cls(parts[0].model_stage, **{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


def best_settings(candidates: Candidates) -> Candidates:
    """Without the micro-batch and recomputation settings that another of the same shape and region dominates.

    Dominated: no better in the seconds of any wave nor in active and idle bytes. Of equal ones the first stays.
    """
    if not len(candidates):
        return candidates
    keys = (candidates.shape_keys << 1) | spans_nodes(candidates.region)
    order = np.lexsort((candidates.active, candidates.total_seconds, keys))
    ordered, keys = candidates.take(order), keys[order]
    group = np.concatenate([[0], np.cumsum(keys[1:] != keys[:-1])])
    leaner = _leanest_before(ordered.active, group)
    rows = np.flatnonzero(leaner >= 0)
    others = leaner[rows]
    needless = (ordered.seconds[others] <= ordered.seconds[rows]).all(axis=1)
    for column in (ordered.active, ordered.idle, ordered.shared_active, ordered.shared_idle):
        needless &= column[others] <= column[rows]
    return ordered.take(np.delete(np.arange(len(ordered)), rows[needless]))


def _leanest_before(active: Ints, group: Ints) -> Ints:
    """For each row the one with fewest active bytes among those before it in its group; -1 for the first of a group."""
    # each group lies below all before it, so that one running minimum serves all
    lowered = active - group * (2 * int(active.max(initial=0)) + 1)
    first = np.concatenate([[True], lowered[1:] < np.minimum.accumulate(lowered)[:-1]])
    leanest = np.maximum.accumulate(np.where(first, np.arange(len(active)), 0))
    before = np.concatenate([[-1], leanest[:-1]])
    before[1:][group[1:] != group[:-1]] = -1
    return before
