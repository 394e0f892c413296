"""Which elements every rank must get from which other, for any layout to any layout on any devices. Pure.

Source boxes are intersected with target boxes. What a target rank holds itself is a local copy (or stays where it
is); everything else arrives exactly once, so the elements that cross between devices equal the lower bound. Split,
Merge, Extend and weight synchronization are special cases. One plan serves every kind of state (parameters, masters,
moments), because all have the same offsets.

A plan is made of runs: strided copies between the two flat buffers. Runs that follow each other on both sides are
joined, alignment gaps included, so a replica is one contiguous copy.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

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
    """

    source: Holding
    target: Holding
    local: tuple[Move, ...]
    kept: frozenset[int]
    remote: tuple[Move, ...]

    @functools.cached_property
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
        local, incoming, outgoing = self._by_device
        own = local.get(device)
        return DeviceMoves(device, own, tuple(incoming.get(device, ())), tuple(outgoing.get(device, ())))

    @functools.cached_property
    def _by_device(self) -> tuple[dict[int, Move], dict[int, list[Move]], dict[int, list[Move]]]:
        """The local, incoming and outgoing moves of each device, so that no device looks through those of all."""
        incoming: dict[int, list[Move]] = defaultdict(list)
        outgoing: dict[int, list[Move]] = defaultdict(list)
        for move in self.remote:
            incoming[move.target].append(move)
            outgoing[move.source].append(move)
        return {move.target: move for move in self.local}, incoming, outgoing

    @functools.cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between different plans; ranks compare them before they send."""
        digest = hashlib.blake2b(repr((self.source, self.target, self.remote)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


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
    node = dict(nodes)
    choice = _SourceChoice(spec, source, node)
    taken: dict[tuple[int, int], list[tuple[str, Box]]] = defaultdict(list)
    local: list[Move] = []
    held = dict(source.ranks)
    replicas = [d for d, _ in target.ranks if d not in held] if source.layout == target.layout else []
    for device, name, box, holder in choice.whole_replicas(target, replicas):
        taken[holder, device].append((name, box))
    lacking: list[tuple[int, str, Box]] = []
    for device, rank in target.ranks:
        wanted = shards(spec, target.layout, rank)
        own = shard_table(spec, source.layout, held[device]) if device in held else {}
        common = [(s.param.name, part) for s in wanted if s.param.name in own
                  if (part := s.box.intersect(own[s.param.name].box)) is not None]  # fmt: skip
        if common:
            local.append(_move(spec, source, target, device, device, common))
        if device not in replicas:
            lacking += [(device, s.param.name, box) for s in wanted for box in _rest(s, own.get(s.param.name))]
    for device, name, box, holder in choice.pieces(lacking):
        taken[holder, device].append((name, box))
    remote = [_move(spec, source, target, s, t, boxes, same_node=node[s] == node[t]) for (s, t), boxes in taken.items()]
    kept = frozenset(d for d, rank in target.ranks if source.layout == target.layout and held.get(d) == rank)
    return Moves(source, target, tuple(local), kept, _in_rounds(remote, node))


def _rest(wanted: Shard, own: Shard | None) -> list[Box]:
    """What of a wanted shard the device does not hold itself."""
    if own is None:
        return [wanted.box] if wanted.box.numel else []
    return wanted.box.subtract(own.box)


def _in_rounds(moves: Iterable[Move], node: Mapping[int, str]) -> tuple[Move, ...]:
    """Moves in an order in which each round pairs every source with another target, as in a ring."""
    place = {device: index for index, device in enumerate(sorted(node))}

    def key(move: Move) -> tuple[int, int]:
        return (place[move.target] - place[move.source]) % len(place), place[move.source]

    return tuple(dataclasses.replace(move, order=i) for i, move in enumerate(sorted(moves, key=key)))


class _SourceChoice:
    """Decides which holder serves whom: same node first, then the one that has served least."""

    def __init__(self, spec: ModelSpec, source: Holding, node: Mapping[int, str]) -> None:
        self._spec, self._source, self._node = spec, source, node
        self._load: dict[int, int] = dict.fromkeys(source.devices, 0)
        self._by_rank: dict[int, list[int]] = defaultdict(list)
        for device, rank in source.ranks:
            self._by_rank[rank].append(device)

    def whole_replicas(self, target: Holding, devices: list[int]) -> Iterator[tuple[int, str, Box, int]]:
        """(device, parameter, box, holder) for devices that lack all of a buffer that lives elsewhere.

        The holders of a rank share what must be sent in equal contiguous spans, so that a pair of devices exchanges
        one run.
        """
        receivers: dict[tuple[int, str], list[int]] = defaultdict(list)
        for device in devices:
            receivers[dict(target.ranks)[device], self._node[device]].append(device)
        for (rank, node), group in receivers.items():
            every = self._by_rank[rank]
            holders = [d for d in every if self._node[d] == node] or every
            cells = [(d, s) for d in group for s in shards(self._spec, target.layout, rank) if s.box.numel]
            total, before = sum(shard.box.numel for _, shard in cells), 0
            for device, shard in cells:
                middle = before + shard.box.numel // 2
                holder = holders[middle * len(holders) // total]
                before += shard.box.numel
                self._load[holder] += shard.box.numel
                yield device, shard.param.name, shard.box, holder

    def pieces(self, lacking: list[tuple[int, str, Box]]) -> Iterator[tuple[int, str, Box, int]]:
        """(device, parameter, piece, holder), largest pieces assigned first."""
        atoms = [(device, *atom) for device, name, box in lacking for atom in self._atoms(name, box)]
        for device, name, box, holders in sorted(atoms, key=lambda atom: -atom[2].numel):
            holder = min(holders, key=lambda h: (self._node[h] != self._node[device], self._load[h], h))
            self._load[holder] += box.numel
            yield device, name, box, holder

    def _atoms(self, name: str, box: Box) -> list[tuple[str, Box, tuple[int, ...]]]:
        """The box cut so that each part lies whole in or whole outside every source shard, with its holders."""
        held = [(rank, common) for rank, shard in _holders(self._spec, self._source.layout, name)
                if (common := shard.intersect(box)) is not None]  # fmt: skip
        parts = [box]
        for _, common in held:
            parts = [p for part in parts for p in _split(part, common)]
        atoms = []
        for part in parts:
            ranks = [rank for rank, common in held if part.intersect(common) == part]
            holders = tuple(device for rank in ranks for device in self._by_rank[rank])
            assert holders, f"{name} {part}: no source holds it"
            atoms.append((name, part, holders))
        return atoms


def _split(box: Box, by: Box) -> list[Box]:
    """A box as disjoint boxes, each inside or outside `by`."""
    common = box.intersect(by)
    return box.subtract(by) if common is None else [common, *box.subtract(by)]


@functools.lru_cache(maxsize=65536)
def _holders(spec: ModelSpec, layout: Layout, name: str) -> tuple[tuple[int, Box], ...]:
    """(rank, box) of every rank that holds a part of the parameter."""
    tables = ((rank, shard_table(spec, layout, rank).get(name)) for rank in range(layout.num_ranks))
    return tuple((rank, shard.box) for rank, shard in tables if shard is not None and shard.box.numel)


def _move(
    spec: ModelSpec,
    source: Holding,
    target: Holding,
    source_device: int,
    target_device: int,
    boxes: Iterable[tuple[str, Box]],
    *,
    same_node: bool = True,
) -> Move:
    source_rank, target_rank = dict(source.ranks)[source_device], dict(target.ranks)[target_device]
    from_table = shard_table(spec, source.layout, source_rank)
    to_table = shard_table(spec, target.layout, target_rank)
    boxes = tuple(boxes)
    runs = [run for name, box in boxes for run in _runs(box, from_table[name], to_table[name])]
    gaps = _gaps(spec, source.layout, source_rank), _gaps(spec, target.layout, target_rank)
    joined = tuple(_joined(sorted(runs, key=lambda run: run.target_offset), *gaps))
    return Move(source_device, target_device, joined, sum(box.numel for _, box in boxes), same_node)


def _runs(box: Box, source: Shard, target: Shard) -> Iterator[Run]:
    """The strided copies that carry a box from one row-major shard to another."""
    inner = len(box.shape) - 1
    while inner > 0 and box.shape[inner] == source.box.shape[inner] == target.box.shape[inner]:
        inner -= 1
    from_strides, to_strides = _strides(source.box), _strides(target.box)
    first = [range(n) for n in box.shape[: max(inner - 1, 0)]]
    row_numel = _product(box.shape[inner:])
    for index in itertools.product(*first):
        at = tuple(a + i for a, i in zip(box.start, index, strict=False)) + box.start[len(index) :]
        from_offset = source.offset + _offset(at, source.box, from_strides)
        to_offset = target.offset + _offset(at, target.box, to_strides)
        if inner == 0:
            yield Run(from_offset, to_offset, row_numel)
        else:
            yield Run(
                from_offset, to_offset, row_numel, box.shape[inner - 1], from_strides[inner - 1], to_strides[inner - 1]
            )


def _strides(box: Box) -> tuple[int, ...]:
    return tuple(_product(box.shape[dim + 1 :]) for dim in range(len(box.shape)))


def _offset(at: tuple[int, ...], box: Box, strides: tuple[int, ...]) -> int:
    return sum((a - o) * s for a, o, s in zip(at, box.start, strides, strict=True))


def _product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


@functools.lru_cache(maxsize=4096)
def _gaps(spec: ModelSpec, layout: Layout, rank: int) -> dict[int, int]:
    """End of each stored tensor -> start of the next, where alignment leaves a gap."""
    held = [shard for shard in shards(spec, layout, rank) if shard.box.numel]
    ends = ((a.offset + a.box.numel, b.offset) for a, b in itertools.pairwise(held))
    return {end: start for end, start in ends if start > end}


def _joined(runs: Iterable[Run], source_gaps: Mapping[int, int], target_gaps: Mapping[int, int]) -> Iterator[Run]:
    """Runs, ascending in the target, with contiguous neighbours made one; only alignment gaps are bridged."""
    last: Run | None = None
    for run in runs:
        if last is not None and last.rows == run.rows == 1:
            from_end, to_end = last.source_offset + last.numel, last.target_offset + last.numel
            gap = run.target_offset - to_end
            bridged = source_gaps.get(from_end) == run.source_offset and target_gaps.get(to_end) == run.target_offset
            if run.source_offset - from_end == gap and (gap == 0 or bridged):
                last = dataclasses.replace(
                    last, row_numel=last.numel + gap + run.numel, padding=last.padding + gap + run.padding
                )
                continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


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
    count = 0
    for device, rank in target.ranks:
        own = shard_table(spec, source.layout, held[device]) if device in held else {}
        for shard in shards(spec, target.layout, rank):
            common = shard.box.intersect(own[shard.param.name].box) if shard.param.name in own else None
            count += shard.box.numel - (common.numel if common is not None else 0)
    return count
