"""Devices, nodes and links: what a plan is placed on. Values only.

A cluster is written `8x8xh200` (nodes x devices x type), given as YAML, or found (`nereus.launch.discovery`).
"""

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from nereus.errors import ClusterError


class Link(enum.StrEnum):
    """Class of the path between two devices. Each has its own learned efficiency."""

    SELF = "self"
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """Peaks of one accelerator type. Bandwidths are per device, one direction."""

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    host_bytes_per_s: float = 25e9


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Device:
    """One accelerator, or one CPU worker that stands for one."""

    id: int
    node: str
    accelerator: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The devices available now. `cores_per_node`: processor cores that CPU workers of one node share, else None."""

    devices: tuple[Device, ...]
    accelerators: tuple[Accelerator, ...]
    cores_per_node: int | None = None

    def __post_init__(self) -> None:
        known = {a.name for a in self.accelerators}
        for device in self.devices:
            if device.accelerator not in known:
                raise ClusterError(
                    f"device {device.id} has unknown type {device.accelerator!r}; known: {sorted(known)}"
                )
        if len({d.id for d in self.devices}) != len(self.devices):
            raise ClusterError("device ids repeat")

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def device_ids(self) -> tuple[int, ...]:
        return tuple(d.id for d in self.devices)

    @functools.cached_property
    def nodes(self) -> dict[str, tuple[Device, ...]]:
        """Devices of each node, in order of first appearance."""
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.node, []).append(device)
        return {node: tuple(devices) for node, devices in found.items()}

    def to_json(self) -> dict[str, Any]:
        """As `events.jsonl` has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Cluster":
        return cls(
            tuple(Device(**row) for row in fields["devices"]),
            tuple(Accelerator(**row) for row in fields["accelerators"]),
            fields["cores_per_node"],
        )

    def device(self, device_id: int) -> Device:
        return self._by_id[device_id]

    @functools.cached_property
    def _by_id(self) -> dict[int, Device]:
        return {device.id: device for device in self.devices}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.accelerators, self.cores_per_node))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Cluster"], tuple[Any, ...]]:
        return Cluster, (self.devices, self.accelerators, self.cores_per_node)  # hashes differ between processes

    def accelerator(self, name: str) -> Accelerator:
        return next(a for a in self.accelerators if a.name == name)

    def link(self, a: int, b: int) -> Link:
        if a == b:
            return Link.SELF
        return Link.INTRA_NODE if self.device(a).node == self.device(b).node else Link.INTER_NODE

    def restricted(self, device_ids: Iterable[int]) -> "Cluster":
        """The cluster with only these devices."""
        keep = set(device_ids)
        return dataclasses.replace(self, devices=tuple(d for d in self.devices if d.id in keep))


HEADROOM = 0.10
"""Share of a device's memory that no plan and no transition may use."""

_SHORT = re.compile(r"^(\d+)x(\d+)x([a-z0-9._-]+)$", re.IGNORECASE)

GB = 10**9

MAX_DEVICES = 1 << 20
"""Devices a written cluster may have; so that a slip of a key is refused at once."""

MAX_FIGURE = 1e9
"""Any figure of an accelerator in GB, GB/s or TFLOPS."""


def _accelerator(
    name: str, tflops: float, memory_gb: float, memory_gb_per_s: float, intra_gb_per_s: float, inter_gb_per_s: float
) -> Accelerator:
    return Accelerator(
        name, tflops * 1e12, int(memory_gb * GB), memory_gb_per_s * GB, intra_gb_per_s * GB, inter_gb_per_s * GB
    )


ACCELERATORS = {
    a.name: a
    for a in (
        _accelerator("cpu", 0.16, 4, 4.0, 4.0, 1.0),
        _accelerator("v100", 125, 32, 900, 150, 3.1),
        _accelerator("t4", 65, 16, 320, 16, 3.1),
        _accelerator("a10", 125, 24, 600, 32, 3.1),
        _accelerator("a100-40gb", 312, 40, 1555, 300, 25),
        _accelerator("a100", 312, 80, 2039, 300, 25),
        _accelerator("a100-pcie", 312, 80, 1935, 32, 25),
        _accelerator("a800", 312, 80, 2039, 200, 25),
        _accelerator("l4", 121, 24, 300, 32, 3.1),
        _accelerator("l40s", 362, 48, 864, 32, 25),
        _accelerator("h20", 148, 96, 4000, 450, 50),
        _accelerator("h100", 989, 80, 3350, 450, 50),
        _accelerator("h100-96gb", 989, 96, 2400, 450, 50),
        _accelerator("h100-pcie", 756.5, 80, 2000, 64, 50),
        _accelerator("h800", 989, 80, 3350, 200, 50),
        _accelerator("h200", 989, 141, 4800, 450, 50),
        _accelerator("gh200", 989, 96, 4000, 450, 50),
        _accelerator("b200", 2250, 180, 7700, 900, 50),
        _accelerator("gb200", 2500, 186, 8000, 900, 50),
        _accelerator("b300", 2250, 288, 8000, 900, 100),
        _accelerator("gb300", 2500, 288, 8000, 900, 100),
        _accelerator("mi250x", 191.5, 64, 1638, 50, 12.5),
        _accelerator("mi300x", 1307.4, 192, 5300, 448, 50),
        _accelerator("mi325x", 1300, 256, 6000, 448, 50),
    )
}
"""Dense bf16 peaks (fp16 for `v100` and `t4`; fp32 for `cpu`, one core of the kind measured in the project's facts),
memory, and link bandwidths per device in one direction: the vendors' data sheets as collected in the published hardware
table (aiconfigurator systems files, ml-engineering's accelerator and network pages). `mi250x` is one of its two dies,
`h100-96gb` the 500 W part with slower memory."""

ALIASES = {
    "a100-80gb": "a100",
    "a100-sxm": "a100",
    "a100-80gb-sxm": "a100",
    "a100-40gb-sxm": "a100-40gb",
    "a800-80gb": "a800",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "h100-80gb-sxm": "h100",
    "h200-sxm": "h200",
    "h200-141gb": "h200",
    "v100-32gb": "v100",
    "gh200-480gb": "gh200",
    "a100-40g": "a100-40gb",
    "a100-80g": "a100",
    "a100-80gb-pcie": "a100-pcie",
    "mi250x-mi250": "mi250x",
    "mi300x-oam": "mi300x",
    "mi325x-oam": "mi325x",
}
"""Other spellings that users, drivers and Ray write."""

MIG_OR_VENDOR = re.compile(r"nvidia|amd|instinct|geforce|tesla|graphics|\bsxm\d?\b|\bhbm\w*\b", re.IGNORECASE)


def known_accelerator(name: str) -> Accelerator:
    """The table's accelerator of a name as a user or a driver writes it (`h100`, `NVIDIA H100 80GB HBM3`).

    Raises ClusterError listing the known names.
    """
    for candidate in (name.strip().lower(), plain_name(name)):
        candidate = ALIASES.get(candidate, candidate)
        if candidate in ACCELERATORS:
            return ACCELERATORS[candidate]
    raise ClusterError(f"unknown accelerator type {name!r}; known: {', '.join(ACCELERATORS)}")


def plain_name(name: str) -> str:
    """`h100-80gb` of `NVIDIA H100 80GB HBM3`: lower case, words joined by hyphens, without vendor and form factor."""
    return "-".join(MIG_OR_VENDOR.sub(" ", name.replace("-", " ")).lower().split())


def similar_accelerator(
    name: str, *, memory_bytes: int | None = None, memory_bytes_per_s: float | None = None
) -> Accelerator:
    """The table's accelerator of a name, or one described by what is told and by the nearest that the table knows.

    Nearest: of the same model (`A100-PCIE-40GB` and `a100-40gb`), or else of all, by the logarithms of memory and
    bandwidth. Raises ClusterError where the model is unknown and nothing is told.
    """
    try:
        return known_accelerator(name)
    except ClusterError:
        model = _model_of(plain_name(name))
        family = [a for a in ACCELERATORS.values() if _model_of(a.name) == model]
        if not family and memory_bytes is None:
            raise
    told = {"memory_bytes": memory_bytes, "memory_bytes_per_s": memory_bytes_per_s}
    figures: dict[str, Any] = {field: value for field, value in told.items() if value is not None}

    def distance(known: Accelerator) -> float:
        return math.hypot(*(math.log(value / getattr(known, field)) for field, value in figures.items()))

    nearest = min(family or [a for a in ACCELERATORS.values() if a.name != "cpu"], key=distance)
    return dataclasses.replace(nearest, name=plain_name(name), **figures)


def _model_of(plain: str) -> str:
    """`a100` of `a100-pcie`, `a10` of `a10g`: the leading word up to its number."""
    match = re.match(r"[a-z]+\d+", plain)
    return match[0] if match else plain


def log_distance(a: Accelerator, b: Accelerator) -> float:
    """How different two accelerators are: root of the summed squared log ratios of their compute, memory and links."""
    fields = ("flops_per_s", "memory_bytes_per_s", "intra_node_bytes_per_s", "inter_node_bytes_per_s")
    return math.sqrt(sum(math.log(getattr(a, field) / getattr(b, field)) ** 2 for field in fields))


def parse_cluster(text: str) -> Cluster:
    """The cluster of `8x8xh200`: nodes x devices per node x type."""
    match = _SHORT.match(text.strip())
    if not match:
        raise ClusterError(f"cluster {text!r}: write NODESxDEVICESxTYPE such as 8x8xh200, a YAML file, local or ray")
    try:
        accelerator = known_accelerator(match[3])
    except ClusterError as error:
        raise ClusterError(f"cluster {text!r}: {error}") from None
    nodes, size = int(match[1]), int(match[2])
    if not nodes or not size:
        raise ClusterError(f"cluster {text!r}: at least one node with one device is needed")
    _check_size(nodes * size, f"cluster {text!r}")
    return uniform_cluster(num_nodes=nodes, devices_per_node=size, accelerator=accelerator)


def load_cluster(text: str) -> Cluster:
    """The cluster of `8x8xh200` or of a YAML file by path."""
    if not text.lower().endswith((".yaml", ".yml")):
        return parse_cluster(text)
    path = Path(text)
    if not path.is_file():
        raise ClusterError(f"cluster file {text}: not found")
    try:
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterError(f"cluster file {text}: not valid YAML ({' '.join(str(error).split())})") from None
    return cluster_from(described, source=text)


_NODE_KEYS = ("name", "count", "devices", "accelerator", "memory_gb")
_ACCELERATOR_KEYS = ("tflops", "memory_gb", "memory_gb_per_s", "intra_gb_per_s", "inter_gb_per_s")


def cluster_from(described: Any, *, source: str = "cluster") -> Cluster:
    """The cluster of a parsed YAML document.

    nodes:
      - {count: 3, devices: 8, accelerator: h200}
      - {name: old, devices: 6, accelerator: a100, memory_gb: 40}
    accelerators:                       # optional: types the table lacks, or corrections of some figures
      mychip: {tflops: 400, memory_gb: 64, memory_gb_per_s: 2000, intra_gb_per_s: 200, inter_gb_per_s: 25}
    links: {inter_gb_per_s: 12.5}       # optional: what the nodes of this cluster really have
    cores_per_node: 2                   # optional: processor cores that CPU workers of a node share
    """
    _check_keys(described, ("nodes", "accelerators", "links", "cores_per_node"), source)
    links = described.get("links") or {}
    _check_keys(links, ("intra_gb_per_s", "inter_gb_per_s"), f"{source}: links")
    custom = described.get("accelerators") or {}
    _check_mapping(custom, f"{source}: accelerators", "types by name, such as {h100: {memory_gb: 64}}")
    rows = described.get("nodes") or []
    if not isinstance(rows, list):
        raise ClusterError(f"{source}: nodes: expected a list such as [{{devices: 8, accelerator: h200}}]")
    used: dict[str, Accelerator] = {}
    devices: list[Device] = []
    node_names: list[str] = []
    for row in rows:
        _check_keys(row, _NODE_KEYS, f"{source}: nodes")
        accelerator = _described_accelerator(str(row.get("accelerator", "cpu")), custom, links, source)
        used[accelerator.name] = accelerator
        memory_gb = _positive(row.get("memory_gb", accelerator.memory_bytes / GB), f"{source}: memory_gb")
        count = _count(row.get("count", 1), f"{source}: count")
        size = _count(row.get("devices", 1), f"{source}: devices")
        _check_size(len(devices) + count * size, source)
        for copy in range(count):
            base = str(row.get("name", f"node{len(node_names)}"))
            node = f"{base}-{copy}" if "name" in row and count > 1 else base
            if node in node_names:
                raise ClusterError(f"{source}: node {node!r} appears twice; names must differ")
            node_names.append(node)
            for _ in range(size):
                devices.append(Device(len(devices), node, accelerator.name, int(memory_gb * GB)))
    unused = [name for name in custom if _table_name(name) not in map(_table_name, used)]
    if devices and unused:
        raise ClusterError(
            f"{source}: accelerators: no node has {', '.join(map(str, unused))}; nodes have {', '.join(used)}"
        )
    if not devices:
        raise ClusterError(f"{source}: nodes: name at least one, such as {{devices: 8, accelerator: h200}}")
    cores = described.get("cores_per_node")
    return Cluster(
        tuple(devices),
        tuple(used.values()),
        None if cores is None else _count(cores, f"{source}: cores_per_node"),
    )


def _described_accelerator(name: str, custom: Any, links: Any, source: str) -> Accelerator:
    """A table entry with the file's corrections, or a new type whose figures are all given."""
    given = next((row for key, row in custom.items() if _table_name(key) == _table_name(name)), None) or {}
    _check_keys(given, _ACCELERATOR_KEYS, f"{source}: accelerators.{name}")
    missing = [key for key in _ACCELERATOR_KEYS if key not in given]
    if not missing:
        base = _accelerator(name, 1, 1, 1, 1, 1)
    else:
        try:
            base = known_accelerator(name)
        except ClusterError as error:
            hint = f"; or describe it under accelerators with {', '.join(_ACCELERATOR_KEYS)}"
            raise ClusterError(f"{source}: {error}{hint}") from None
    fields = {
        "tflops": ("flops_per_s", 1e12),
        "memory_gb": ("memory_bytes", GB),
        "memory_gb_per_s": ("memory_bytes_per_s", GB),
        "intra_gb_per_s": ("intra_node_bytes_per_s", GB),
        "inter_gb_per_s": ("inter_node_bytes_per_s", GB),
    }
    for key, value in [*given.items(), *links.items()]:
        field, unit = fields[key]
        scaled = _positive(value, f"{source}: {key}") * unit
        changed: dict[str, Any] = {field: int(scaled) if field == "memory_bytes" else scaled}
        base = dataclasses.replace(base, **changed)
    return base


def _table_name(name: Any) -> str:
    """The table's spelling of a type, or the name as it is."""
    try:
        return known_accelerator(str(name)).name
    except ClusterError:
        return str(name)


def _check_size(num_devices: int, where: str) -> None:
    if num_devices > MAX_DEVICES:
        raise ClusterError(f"{where}: {num_devices} devices or more; {MAX_DEVICES} at most")


def _check_mapping(mapping: Any, where: str, expected: str) -> None:
    if not isinstance(mapping, dict):
        raise ClusterError(f"{where}: expected {expected}, found {mapping!r}")


def _check_keys(mapping: Any, allowed: tuple[str, ...], where: str) -> None:
    _check_mapping(mapping, where, f"keys among {', '.join(allowed)}")
    unknown = [str(key) for key in mapping if key not in allowed]
    if unknown:
        raise ClusterError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(allowed)}")


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FIGURE:
        raise ClusterError(f"{where} is {value!r}; it must be a number above 0, {MAX_FIGURE:.0e} at most")
    return float(value)


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{where} is {value!r}; it must be a whole number of at least 1")
    return value


def cluster_of(places: Iterable[tuple[str, Accelerator, int | None]], *, cores_per_node: int | None = None) -> Cluster:
    """Device after device: its node, its type, and its memory in bytes where that differs from the type's.

    cores_per_node: processor cores of a node, which its CPU workers share; of no matter to other types.
    """
    found = list(places)
    devices = tuple(
        Device(number, node, accelerator.name, memory_bytes or accelerator.memory_bytes)
        for number, (node, accelerator, memory_bytes) in enumerate(found)
    )
    kinds = {accelerator.name: accelerator for _, accelerator, _ in found}
    return Cluster(devices, tuple(kinds.values()), cores_per_node if "cpu" in kinds else None)


def uniform_cluster(
    *, num_nodes: int, devices_per_node: int, accelerator: Accelerator, cores_per_node: int | None = None
) -> Cluster:
    """Nodes of equal size and one type; device ids count through the nodes."""
    if num_nodes < 1 or devices_per_node < 1:
        raise ClusterError("a cluster needs at least one node with one device")
    devices = tuple(
        Device(node * devices_per_node + i, f"node{node}", accelerator.name, accelerator.memory_bytes)
        for node in range(num_nodes)
        for i in range(devices_per_node)
    )
    return Cluster(devices, (accelerator,), cores_per_node)
