"""Which elements every rank must get from which other, for any layout to any layout on any devices. Pure.

Source boxes are intersected with target boxes. What a target rank holds itself is a local copy (or stays where it
is); everything else arrives exactly once, so the elements that cross between devices equal the lower bound. Split,
Merge, Extend and weight synchronization are special cases. One plan serves every kind of state (parameters, masters,
moments), because all have the same offsets.

A plan is made of runs: strided copies between the two flat buffers. Runs that follow each other on both sides are
joined, alignment gaps included, so a replica is one contiguous copy.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nereus.model import ModelSpec
from nereus.plan import Layout, StagePlan
from nereus.shards.boxes import Box, Shard, shard_table, shards

__all__ = [
    "DeviceMoves",
    "Holding",
    "Move",
    "Moves",
    "Run",
    "buckets",
    "lower_bound_numel",
    "plan_moves",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """Buffers of one layout: which rank of it each device holds. `ranks`: (device, rank), ascending."""

    layout: Layout
    ranks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, stage_plan: StagePlan) -> "Holding":
        """The buffers of every unit of a plan."""
        return cls.by_device(
            stage_plan.layout, {device: rank for unit in stage_plan.units for rank, device in enumerate(unit)}
        )

    @classmethod
    def by_device(cls, layout: Layout, ranks: Mapping[int, int]) -> "Holding":
        return cls(layout, tuple(sorted(ranks.items())))

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for device, _ in self.ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A copy of `rows` rows of `row_numel` elements; offsets and strides are elements of the flat buffers.

    padding: how many of the elements are alignment gaps between tensors, carried so that the run is contiguous.
    """

    source_offset: int
    target_offset: int
    row_numel: int
    rows: int = 1
    source_stride: int = 0
    target_stride: int = 0
    padding: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.row_numel


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """What device `target` takes from device `source`. `order`: place in the global order of sends.

    numel: elements of tensors, gaps not counted. same_node: whether the two can reach each other's memory.
    """

    source: int
    target: int
    runs: tuple[Run, ...]
    numel: int
    same_node: bool = True
    order: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMoves:
    """The part of one device, each list in the global order."""

    device: int
    local: Move | None
    incoming: tuple[Move, ...]
    outgoing: tuple[Move, ...]


@dataclasses.dataclass(frozen=True)
class Moves:
    """Everything that moves between two holdings.

    local: what a device copies from its own source buffer to its target buffer.
    kept: devices whose source and target buffer have the same layout and rank; their buffer may serve as it is.
    remote: what crosses between devices, in the global order.
    fingerprint: 63 bits that differ between different plans; ranks compare them before they send.
    """

    source: Holding
    target: Holding
    local: tuple[Move, ...]
    kept: frozenset[int]
    remote: tuple[Move, ...]
    fingerprint: int

    @property
    def numel_moved(self) -> int:
        """Elements that cross between devices."""
        return sum(move.numel for move in self.remote)

    @functools.cached_property
    def devices(self) -> tuple[int, ...]:
        """Every device that reads or is read, ascending."""
        taking = {move.target for move in self.local} | {d for move in self.remote for d in (move.source, move.target)}
        return tuple(sorted(taking))

    @functools.cached_property
    def group_devices(self) -> tuple[int, ...]:
        """Devices with a move that must go through a group because the other end is on another node, ascending."""
        return tuple(sorted({d for m in self.remote if not m.same_node for d in (m.source, m.target)}))

    def of_device(self, device: int) -> DeviceMoves:
        """What one device does."""
        return self._by_device.get(device, DeviceMoves(device, None, (), ()))

    @functools.cached_property
    def _by_device(self) -> dict[int, DeviceMoves]:
        incoming: dict[int, list[Move]] = defaultdict(list)
        outgoing: dict[int, list[Move]] = defaultdict(list)
        for move in self.remote:
            incoming[move.target].append(move)
            outgoing[move.source].append(move)
        local = {move.target: move for move in self.local}
        return {
            device: DeviceMoves(device, local.get(device), tuple(incoming[device]), tuple(outgoing[device]))
            for device in {*local, *incoming, *outgoing}
        }


def plan_moves(
    spec: ModelSpec, source: Holding, target: Holding, *, node_of: Callable[[int], str] | None = None
) -> Moves:
    """The moves that fill every target buffer from the source buffers.

    node_of: node of a device; sources on the same node are preferred, and all are taken to share one where it is not
    given. Load is balanced over the replicas that hold a piece. Every piece must have a holder.
    """
    devices = sorted({*source.devices, *target.devices})
    nodes = tuple((device, node_of(device) if node_of else "") for device in devices)
    return _plan_moves(spec, source, target, nodes)


@functools.lru_cache(maxsize=64)
def _plan_moves(spec: ModelSpec, source: Holding, target: Holding, nodes: tuple[tuple[int, str], ...]) -> Moves:
    """Devices that hold the same rank and want the same one lack the same atoms: geometry is worked out once for each
    such kind of device and kept, and devices differ only in who serves them. So the work grows with the devices, not
    with the devices times the parameters."""
    node, held = dict(nodes), dict(source.ranks)
    choice = _SourceChoice(source, node)
    alike: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for device, rank in target.ranks:
        alike[rank, held.get(device)].append(device)
    local: list[Move] = []
    remote: list[Move] = []
    for (rank, own), devices in alike.items():
        geometry = _geometry(spec, source.layout, target.layout, rank)
        if own is not None and (indices := geometry.local(own)):
            local += [Move(device, device, *geometry.copies(own, indices)) for device in devices]
        taken: dict[tuple[int, int], tuple[int, ...]] = {}
        for atoms in geometry.lacking(own):
            for device, holder, (_, first, last) in choice.spans(geometry, atoms, devices):
                taken[holder, device] = taken.get((holder, device), ()) + atoms.indices[first:last]
        remote += [
            Move(s, t, *geometry.copies(held[s], indices), same_node=node[s] == node[t])
            for (s, t), indices in taken.items()
        ]
    kept = frozenset(d for d, rank in target.ranks if source.layout == target.layout and held.get(d) == rank)
    local.sort(key=lambda move: move.target)
    return Moves(
        source, target, tuple(local), kept, _in_rounds(remote, node), _fingerprint(spec, source, target, nodes)
    )


def _fingerprint(*defining: object) -> int:
    """63 bits of what a plan of moves is a function of."""
    digest = hashlib.blake2b(repr(defining).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Atom:
    """A piece of a target rank's parameter that lies whole in or whole outside every source shard. ranks: of the source
    layout, which hold it."""

    name: str
    box: Box
    numel: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Atoms:
    """Atoms that the same source ranks hold, by index, in memory order. middles: where each one's middle lies, in
    elements."""

    ranks: tuple[int, ...]
    indices: tuple[int, ...]
    middles: tuple[int, ...]
    numel: int


_Span = tuple[_Atoms, int, int]
"""The atoms [first, last) of some that the same ranks hold."""


class _Geometry:
    """How a rank of the target layout is put together from the ranks of the source layout, whatever the devices."""

    def __init__(self, spec: ModelSpec, source: Layout, target: Layout, rank: int) -> None:
        self.spec, self.source, self.target, self.rank = spec, source, target, rank
        self.atoms = _atoms(spec, source, target, rank)
        self._lacking: dict[int | None, tuple[_Atoms, ...]] = {}
        self._runs: dict[tuple[int, int], tuple[Run, ...]] = {}
        self._copies: dict[tuple[int, tuple[int, ...]], tuple[tuple[Run, ...], int]] = {}

    def local(self, held: int) -> tuple[int, ...]:
        """Indices of what a device that holds a source rank has itself."""
        return tuple(index for index, atom in enumerate(self.atoms) if held in atom.ranks)

    def lacking(self, held: int | None) -> tuple[_Atoms, ...]:
        """What a device that holds a source rank (None: nothing) must get, by the ranks that hold it."""
        if held not in self._lacking:
            indices = [index for index, atom in enumerate(self.atoms) if held not in atom.ranks]
            found: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for index in indices:  # from its like alone where there is one, so that a replica is one contiguous copy
                found[(self.rank,) if self.source == self.target else self.atoms[index].ranks].append(index)
            self._lacking[held] = tuple(self._together(ranks, some) for ranks, some in found.items())
        return self._lacking[held]

    def _together(self, ranks: tuple[int, ...], indices: Sequence[int]) -> _Atoms:
        middles, before = [], 0
        for index in indices:
            middles.append(before + self.atoms[index].numel // 2)
            before += self.atoms[index].numel
        return _Atoms(ranks, tuple(indices), tuple(middles), before)

    def copies(self, source_rank: int, indices: tuple[int, ...]) -> tuple[tuple[Run, ...], int]:
        """(runs, elements) that bring some atoms from a rank of the source layout."""
        key = source_rank, indices
        if key not in self._copies:
            runs = [run for index in indices for run in self._runs_of(source_rank, index)]
            runs.sort(key=lambda run: run.target_offset)
            gaps = _gaps(self.spec, self.source, source_rank), _gaps(self.spec, self.target, self.rank)
            self._copies[key] = tuple(_joined(runs, *gaps)), sum(self.atoms[index].numel for index in indices)
        return self._copies[key]

    def _runs_of(self, source_rank: int, index: int) -> tuple[Run, ...]:
        if (source_rank, index) not in self._runs:
            atom = self.atoms[index]
            from_shard = shard_table(self.spec, self.source, source_rank)[atom.name]
            to_shard = shard_table(self.spec, self.target, self.rank)[atom.name]
            self._runs[source_rank, index] = tuple(_runs(atom.box, from_shard, to_shard))
        return self._runs[source_rank, index]


@functools.lru_cache(maxsize=512)
def _geometry(spec: ModelSpec, source: Layout, target: Layout, rank: int) -> _Geometry:
    return _Geometry(spec, source, target, rank)


def _atoms(spec: ModelSpec, source: Layout, target: Layout, rank: int) -> tuple[_Atom, ...]:
    """The atoms of everything a target rank holds, in memory order."""
    found: list[_Atom] = []
    for shard in shards(spec, target, rank):
        if not shard.box.numel:
            continue
        held = [(r, common) for r, box in _holders(spec, source, shard.param.name)
                if (common := box.intersect(shard.box)) is not None]  # fmt: skip
        parts = [shard.box]
        for common in dict.fromkeys(common for _, common in held):
            parts = [p for part in parts for p in _split(part, common)]
        found += [
            _Atom(shard.param.name, part, part.numel, tuple(r for r, common in held if part.intersect(common) == part))
            for part in parts
        ]
    return tuple(found)


def _in_rounds(moves: Iterable[Move], node: Mapping[int, str]) -> tuple[Move, ...]:
    """Moves in an order in which each round pairs every source with another target, as in a ring."""
    place = {device: index for index, device in enumerate(sorted(node))}

    def key(move: Move) -> tuple[int, int]:
        return (place[move.target] - place[move.source]) % len(place), place[move.source]

    return tuple(dataclasses.replace(move, order=i) for i, move in enumerate(sorted(moves, key=key)))


class _SourceChoice:
    """Decides which holder serves whom: those of the receiver's node, or else all, in equal contiguous shares.

    What the receivers of a node lack is laid end to end and cut into as many equal spans as there are holders, so that
    the load is balanced, a pair of devices exchanges few runs, and the choice depends on holdings and nodes alone.
    """

    def __init__(self, source: Holding, node: Mapping[int, str]) -> None:
        self._node = node
        self._by_rank: dict[int, list[int]] = defaultdict(list)
        self._near: dict[tuple[int, str], list[int]] = defaultdict(list)
        for device, rank in source.ranks:
            self._by_rank[rank].append(device)
            self._near[rank, node[device]].append(device)

    def spans(self, geometry: _Geometry, atoms: _Atoms, devices: Sequence[int]) -> Iterator[tuple[int, int, _Span]]:
        """(device, holder, span) that give every device all of `atoms`."""
        receivers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        every = tuple(device for rank in atoms.ranks for device in self._by_rank[rank])
        near: dict[str, tuple[int, ...]] = {}
        for device in devices:
            node = self._node[device]
            if node not in near:
                near[node] = tuple(d for rank in atoms.ranks for d in self._near.get((rank, node), ())) or every
            receivers[near[node]].append(device)
        for holders, group in receivers.items():
            lost = geometry.atoms[atoms.indices[0]]
            assert holders, f"{lost.name} {lost.box}: no source holds it"
            yield from _shares(atoms, group, holders)


def _shares(atoms: _Atoms, group: Sequence[int], holders: Sequence[int]) -> Iterator[tuple[int, int, _Span]]:
    """(device, holder, span): the atoms of all receivers, end to end, in as many equal spans as there are holders. An
    atom belongs to the span that its middle lies in."""
    total, last = atoms.numel * len(group), len(atoms.indices)
    for place, device in enumerate(group):
        before, first = atoms.numel * place, 0
        while first < last:
            serving = (before + atoms.middles[first]) * len(holders) // total
            reach = -(-(serving + 1) * total // len(holders)) - before
            until = bisect.bisect_left(atoms.middles, reach, lo=first)
            yield device, holders[serving], (atoms, first, until)
            first = until


def _split(box: Box, by: Box) -> list[Box]:
    """A box as disjoint boxes, each inside or outside `by`."""
    common = box.intersect(by)
    return box.subtract(by) if common is None else [common, *box.subtract(by)]


@functools.lru_cache(maxsize=65536)
def _holders(spec: ModelSpec, layout: Layout, name: str) -> tuple[tuple[int, Box], ...]:
    """(rank, box) of every rank that holds a part of the parameter."""
    tables = ((rank, shard_table(spec, layout, rank).get(name)) for rank in range(layout.num_ranks))
    return tuple((rank, shard.box) for rank, shard in tables if shard is not None and shard.box.numel)


def _runs(box: Box, source: Shard, target: Shard) -> Iterator[Run]:
    """The strided copies that carry a box from one row-major shard to another."""
    shape, from_shape, to_shape = box.shape, source.box.shape, target.box.shape
    inner = len(shape) - 1
    while inner > 0 and shape[inner] == from_shape[inner] == to_shape[inner]:
        inner -= 1
    from_strides, to_strides = _strides(from_shape), _strides(to_shape)
    first = [range(n) for n in shape[: max(inner - 1, 0)]]
    row_numel = math.prod(shape[inner:])
    for index in itertools.product(*first):
        at = tuple(a + i for a, i in zip(box.start, index, strict=False)) + box.start[len(index) :]
        from_offset = source.offset + _offset(at, source.box, from_strides)
        to_offset = target.offset + _offset(at, target.box, to_strides)
        if inner == 0:
            yield Run(from_offset, to_offset, row_numel)
        else:
            yield Run(
                from_offset, to_offset, row_numel, shape[inner - 1], from_strides[inner - 1], to_strides[inner - 1]
            )


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _offset(at: tuple[int, ...], box: Box, strides: tuple[int, ...]) -> int:
    return sum((a - o) * s for a, o, s in zip(at, box.start, strides, strict=True))


@functools.lru_cache(maxsize=4096)
def _gaps(spec: ModelSpec, layout: Layout, rank: int) -> dict[int, int]:
    """End of each stored tensor -> start of the next, where alignment leaves a gap."""
    held = [shard for shard in shards(spec, layout, rank) if shard.box.numel]
    ends = ((a.offset + a.box.numel, b.offset) for a, b in itertools.pairwise(held))
    return {end: start for end, start in ends if start > end}


def _joined(runs: Iterable[Run], source_gaps: Mapping[int, int], target_gaps: Mapping[int, int]) -> Iterator[Run]:
    """Runs, ascending in the target, with contiguous neighbours made one; only alignment gaps are bridged."""
    first: Run | None = None
    from_end = to_end = padding = 0  # where the row that begins with `first` ends by now, and the gaps in it
    for run in runs:
        if first is not None and first.rows == run.rows == 1:
            gap = run.target_offset - to_end
            bridged = source_gaps.get(from_end) == run.source_offset and target_gaps.get(to_end) == run.target_offset
            if run.source_offset - from_end == gap and (gap == 0 or bridged):
                from_end, to_end = run.source_offset + run.row_numel, run.target_offset + run.row_numel
                padding += gap + run.padding
                continue
        if first is not None:
            yield _lengthened(first, to_end, padding)
        first, padding = run, run.padding
        from_end, to_end = run.source_offset + run.row_numel, run.target_offset + run.row_numel
    if first is not None:
        yield _lengthened(first, to_end, padding)


def _lengthened(run: Run, to_end: int, padding: int) -> Run:
    """A run whose first row goes on to an end in the target."""
    numel = to_end - run.target_offset
    return run if numel == run.row_numel else Run(run.source_offset, run.target_offset, numel, padding=padding)


def buckets(runs: Iterable[Run], limit_numel: int) -> Iterator[tuple[Run, ...]]:
    """Consecutive runs in lots of at most `limit_numel` elements; a run larger than that is cut."""
    lot: list[Run] = []
    size = 0
    for run in itertools.chain.from_iterable(_cut(run, limit_numel) for run in runs):
        if lot and size + run.numel > limit_numel:
            yield tuple(lot)
            lot, size = [], 0
        lot.append(run)
        size += run.numel
    if lot:
        yield tuple(lot)


def _cut(run: Run, limit: int) -> Iterator[Run]:
    """A run in parts of at most `limit` elements: whole rows where one fits, else parts of rows."""
    if run.numel <= limit:
        yield run
    elif run.row_numel <= limit:
        step = limit // run.row_numel
        for row in range(0, run.rows, step):
            yield dataclasses.replace(
                run,
                source_offset=run.source_offset + row * run.source_stride,
                target_offset=run.target_offset + row * run.target_stride,
                rows=min(step, run.rows - row),
            )
    else:
        for row, column in itertools.product(range(run.rows), range(0, run.row_numel, limit)):
            yield Run(
                run.source_offset + row * run.source_stride + column,
                run.target_offset + row * run.target_stride + column,
                min(limit, run.row_numel - column),
            )


def lower_bound_numel(spec: ModelSpec, source: Holding, target: Holding) -> int:
    """Elements that must arrive: of every target buffer, what its device does not hold in its source buffer."""
    held = dict(source.ranks)
    return sum(_lacking_numel(spec, source.layout, held.get(d), target.layout, rank) for d, rank in target.ranks)


@functools.lru_cache(maxsize=4096)
def _lacking_numel(spec: ModelSpec, source: Layout, held: int | None, target: Layout, rank: int) -> int:
    own = shard_table(spec, source, held) if held is not None else {}
    count = 0
    for shard in shards(spec, target, rank):
        common = shard.box.intersect(own[shard.param.name].box) if shard.param.name in own else None
        count += shard.box.numel - (common.numel if common is not None else 0)
    return count
