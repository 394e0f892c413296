"""What weight synchronizations cost: the parameters of every source candidate to the units of every target.

Each target rank receives its boxes once; the copies are spread over the source ranks, so the busier side of the two
bounds the time.
"""

import functools
import math

import numpy as np

from nereus.cluster import Link
from nereus.engine_facts import Op, Precision
from nereus.model import ModelSpec
from nereus.planner.prices.footprints import layout_table
from nereus.planner.prices.operations import COLUMN, Counts
from nereus.planner.prices.syncs import Shapes
from nereus.planner.prices.task_prices import Layouts
from nereus.planner.space.arrays import Floats, Ints
from nereus.planner.space.candidates import Candidates

LAUNCH = COLUMN[(Op.LAUNCH, None)]


def sync_link(num_nodes: int) -> Link:
    """The link a synchronization is priced on: that between nodes, where there are any."""
    return Link.INTRA_NODE if num_nodes == 1 else Link.INTER_NODE


def sync_seconds(
    spec: ModelSpec,
    precision: Precision,
    sources: "Shapes | Candidates",
    targets: "Shapes | Candidates",
    *,
    largest_numel: Floats | Ints,
    lines: Counts,
    link: Link,
    slower: Ints | None = None,
) -> Floats:
    """[sources, targets]: seconds from each to each.

    largest_numel: [targets] elements of each target's largest flat buffer. lines: [types, 2, classes] seconds per work
    and per call. slower: [sources, targets] number of the slower type of the two sides; None where there is one.
    """
    wide, hop = precision.param_bytes, COLUMN[(Op.POINT_TO_POINT, link)]
    sent = np.multiply.outer(spec.num_params * wide / sources.num_devices, targets.dp)
    moved = np.maximum(largest_numel * wide, sent)
    pieces = np.maximum(1, sources.tp[:, None] // targets.tp) * (spec.num_layers / targets.pp)
    per_byte, per_piece, launch = lines[:, 0, hop], lines[:, 1, hop], lines[:, 1, LAUNCH]
    at = 0 if slower is None else slower
    seconds: Floats = moved * per_byte[at] + pieces * per_piece[at] + launch[at]
    return seconds


@functools.lru_cache(maxsize=32)
def largest_numel(spec: ModelSpec, layouts: Layouts) -> Floats:
    """[tp, pp]: elements of the largest flat buffer under each layout; infinite where there is none."""
    table = layout_table(spec, layouts)
    numel = np.full((int(table.tp.max(initial=0)) + 1, int(table.pp.max(initial=0)) + 1), math.inf)
    numel[table.tp, table.pp] = table.largest_numel
    return numel
