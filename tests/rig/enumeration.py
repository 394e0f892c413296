"""The optimum of a planning instance by trying everything: no bound, no dominance, no canonical positions.

Separate from the planner on purpose: it shares the candidates' numbers and nothing else. Every candidate of every
model-stage is put at every position of the line; every combination of those is priced device by device.
"""

import itertools
import math

import numpy as np

from nereus.cluster import Cluster
from nereus.plan import Stage


def speeds(cluster: Cluster):
    """Sort key of each type, smallest for the fastest."""
    return {
        a.name: (-a.flops_per_s, -a.memory_bytes_per_s, -a.intra_node_bytes_per_s, a.name) for a in cluster.accelerators
    }


def line(cluster: Cluster):
    """Devices node after node, strongest type first: (device, node number, slowest type up to here)."""
    speed = speeds(cluster)
    nodes = [sorted(n, key=lambda d: (speed[d.accelerator], -d.memory_bytes)) for n in cluster.nodes.values()]
    nodes.sort(key=lambda n: (speed[n[-1].accelerator], speed[n[0].accelerator], -n[-1].memory_bytes))
    devices, slowest = [], None
    for number, node in enumerate(nodes):
        for device in node:
            slowest = max(slowest or device.accelerator, device.accelerator, key=speed.__getitem__)
            devices.append((device, number, slowest))
    return devices


def block(devices, start, grain, groups):
    """Positions from `start` to the last one that `groups` groups of `grain` fill, or None; groups stay in a node."""
    position, end = start, start
    for _ in range(groups):
        while True:
            if position + grain > len(devices):
                return None
            if devices[position][1] == devices[position + grain - 1][1]:
                break
            position += 1
        position += grain
        end = position
    return range(start, end)


def regions(devices):
    """[(slowest type so far, within one node), ...] in the order candidates are numbered by."""
    names = list(dict.fromkeys(slowest for _, _, slowest in devices))
    return [(name, inside) for name in names for inside in (True, False)]


def positions(devices, candidate):
    """Every span where a candidate may lie: it begins with its first group, in the region it was priced for."""
    name, inside = regions(devices)[candidate.region]
    found = []
    for start in range(len(devices)):
        span = block(devices, start, candidate.grain, candidate.num_groups)
        if span is None or devices[start][1] != devices[start + candidate.grain - 1][1]:
            continue
        one_node = devices[span[0]][1] == devices[span[-1]][1]
        if devices[span[-1]][2] == name and (one_node or not inside):
            found.append(span)
    return found


def row_choices(devices, tables, members, *, in_turn):
    """All joint choices of the model-stages of one stage: [(candidate number, span), ...] per choice."""
    options = []
    for m in members:
        table = tables[m]
        options.append([(i, s) for i in range(len(table)) for s in positions(devices, table[i])])
    for choice in itertools.product(*options):
        taken = [p for _, span in choice for p in span]
        if len({span[0] for _, span in choice}) == 1 if in_turn else len(set(taken)) == len(taken):
            yield choice


class Row:
    """The joint choices of one stage: for each member its candidate numbers, spans and covered devices as arrays."""

    def __init__(self, devices, tables, members, *, in_turn):
        self.members = members
        choices = list(row_choices(devices, tables, members, in_turn=in_turn))
        self.count = len(choices)
        place = np.arange(len(devices))
        self.number, self.span, self.cover = {}, {}, {}
        for i, m in enumerate(members):
            self.number[m] = np.array([choice[i][0] for choice in choices], dtype=np.int64)
            spans = np.array([(choice[i][1][0], choice[i][1][-1]) for choice in choices]).reshape(-1, 2)
            self.span[m] = spans
            self.cover[m] = (spans[:, :1] <= place) & (place <= spans[:, 1:])

    def pick(self, index):
        """One choice as a row of length one."""
        picked = Row.__new__(Row)
        picked.members, picked.count, at = self.members, 1, slice(index, index + 1)
        for name in ("number", "span", "cover"):
            setattr(picked, name, {m: getattr(self, name)[m][at] for m in self.members})
        return picked


def optimum(cluster, tables, *, syncs, sync_price, capacity, placement, overlapped=False):
    """(step seconds, combinations tried) of the fastest combination that fits; seconds infinite where none does.

    capacity: usable bytes by device id. overlapped: generation has devices of its own, beside the rest of the step.
    """
    devices = line(cluster)
    in_turn = placement == "colocated"
    rows = []
    for stage in Stage:
        members = [m for m in tables if m.stage is stage]
        if members:
            rows.append(Row(devices, tables, members, in_turn=in_turn))
    rows.sort(key=lambda row: row.count)
    room = np.array([capacity[device.id] for device, _, _ in devices], dtype=np.int64)
    prices = {}
    for source, target in syncs:
        prices[source, target] = sync_price(source, tables[source], tables[target])
    best, tried = math.inf, 0
    if not all(row.count for row in rows):
        return best, tried
    *outer, inner = rows
    for picks in itertools.product(*(range(row.count) for row in outer)):
        whole = [*(row.pick(i) for row, i in zip(outer, picks, strict=True)), inner]
        seconds = step_seconds(whole, tables, syncs, prices, room, placement, overlapped)
        tried += len(seconds)
        best = min(best, float(seconds.min()))
    return best, tried


def step_seconds(rows, tables, syncs, prices, room, placement, overlapped):
    """Step seconds of every choice (broadcast over the rows); infinite where it does not fit."""
    number, span, cover = (
        {m: getattr(row, name)[m] for row in rows for m in row.members} for name in ("number", "span", "cover")
    )
    shared = dict.fromkeys(number, np.array([False]))
    total = np.zeros(rows[-1].count)
    for source, target in syncs:
        a, b = number[source], number[target]
        same = (span[source] == span[target]).all(axis=1)
        for name in ("tp", "pp", "dp"):
            same = same & (getattr(tables[source], name)[a] == getattr(tables[target], name)[b])
        shared[target] = same
        total = total + np.where(same, 0.0, prices[source, target][a, b])
    idle, peak, load, roles, sides = 0, 0, 0.0, {}, {}
    for m, table in tables.items():
        i, covered = number[m], cover[m]
        held = np.where(shared[m], table.shared_idle[i], table.idle[i])
        active = np.where(shared[m], table.shared_active[i], table.active[i])
        idle = idle + held[:, None] * covered
        peak = np.maximum(peak, (active - held)[:, None] * covered)
        load = load + table.seconds[i][:, :, None] * covered[:, None, :]
        roles[m.role] = roles.get(m.role, False) | covered
        generates = m.stage == Stage.GENERATION
        sides[generates] = sides.get(generates, False) | covered
    bad = (idle + peak > room).any(axis=1)
    generation, *others = load.max(axis=2).T
    if overlapped:
        total = total + np.maximum(generation, sum(others))
        bad = bad | (sides[True] & sides[False]).any(axis=1)
    else:
        total = total + generation + sum(others)
    if placement == "colocated":
        first = next(iter(span.values()))[:, 0]
        for other in span.values():
            bad = bad | (other[:, 0] != first)
    if placement == "disjoint":
        bad = bad | (sum(r.astype(int) for r in roles.values()) > 1).any(axis=1)
    return np.where(bad, math.inf, total)
