"""Blocks on the line of devices: where they may lie, and that arrangements are found whenever there are any."""

import itertools
import random

import enumeration
from instances import random_cluster

from nereus.cluster import ACCELERATORS, Cluster, Device, parse_cluster, uniform_cluster
from nereus.planner.search.positions import place
from nereus.planner.space.line import Block, Line


def test_groups_never_cross_a_node():
    line = Line(parse_cluster("3x4xh100"))
    for grain, groups, start in itertools.product((1, 2, 3, 4), (1, 2, 3), range(12)):
        end = line.end(start, grain, groups)
        if end is None:
            continue
        ids = line.groups(line.first_group(start, grain), grain, groups)
        for first in range(0, len(ids), grain):
            assert len({device // 4 for device in ids[first : first + grain]}) == 1
        assert ids[-1] + 1 == end


def test_ends_agree_with_filling_the_line_device_by_device():
    for seed in range(60):
        rng = random.Random(seed)
        cluster = random_cluster(rng, 14)
        line, devices = Line(cluster), enumeration.line(cluster)
        assert [d.id for d in line.devices] == [d.id for d, _, _ in devices]
        for _ in range(20):
            grain, groups, start = rng.randint(1, 4), rng.randint(1, 4), rng.randrange(len(devices))
            block = enumeration.block(devices, start, grain, groups)
            end = line.end(start, grain, groups)
            assert end == (block[-1] + 1 if block else None)


def test_next_span_is_the_first_valid_one():
    for seed in range(60):
        rng = random.Random(seed)
        cluster = random_cluster(rng, 12)
        line, devices = Line(cluster), enumeration.line(cluster)
        for region in range(len(line.regions)):
            name, inside = enumeration.regions(devices)[region]
            assert (line.regions[region].accelerator, line.regions[region].one_node) == (name, inside)
            grain, groups = rng.randint(1, 3), rng.randint(1, 3)
            spans = valid_spans(devices, grain, groups, name, inside)
            for position in range(len(devices)):
                later = [span for span in spans if span[0] >= position]
                assert line.next_span(position, grain, groups, region) == min(later, default=None)


def valid_spans(devices, grain, groups, name, inside):
    found = set()
    for start in range(len(devices)):
        block = enumeration.block(devices, start, grain, groups)
        if block is None:
            continue
        while devices[start][1] != devices[start + grain - 1][1]:
            start += 1
        one_node = devices[start][1] == devices[block[-1]][1]
        if devices[block[-1]][2] == name and (one_node or not inside):
            found.add((start, block[-1] + 1))
    return found


def arrangement_exists(line, blocks, conflicts):
    """Try every start of every block."""
    options = []
    for block in blocks:
        ends = [(s, line.end(s, block.grain, block.groups)) for s in range(line.num_devices)]
        options.append([(s, e) for s, e in ends if e is not None])
    for spans in itertools.product(*options):
        apart = all(
            spans[a][1] <= spans[b][0] or spans[b][1] <= spans[a][0]
            for a, b in itertools.combinations(range(len(blocks)), 2)
            if conflicts[a] >> b & 1
        )
        if apart and all(fits(line, blocks, spans, p) for p in range(line.num_devices)):
            return True
    return False


def fits(line, blocks, spans, position):
    here = [b for b, (start, end) in zip(blocks, spans, strict=True) if start <= position < end]
    return not here or sum(b.idle for b in here) + max(b.peak for b in here) <= line.capacity_at(position)


def test_an_arrangement_is_found_whenever_there_is_one():
    possible = 0
    for seed in range(150):
        rng = random.Random(seed)
        cluster = uniform_cluster(num_nodes=rng.randint(1, 3), devices_per_node=rng.choice([2, 3]),
                                  accelerator=ACCELERATORS["h100"])  # fmt: skip
        line = Line(cluster)
        size = line.max_capacity
        whole = len(line.regions) - 1
        blocks = [
            Block(i, rng.randint(1, 2), rng.randint(1, 3), whole, int(size * rng.uniform(0, 0.5)),
                  int(size * rng.uniform(0, 0.6)))
            for i in range(4)
        ]  # fmt: skip
        conflicts = [0, 0, 0, 0]
        for a, b in itertools.combinations(range(4), 2):
            if rng.random() < 0.3:
                conflicts[a] |= 1 << b
                conflicts[b] |= 1 << a
        expected = arrangement_exists(line, blocks, conflicts)
        possible += expected
        assert (place(line, blocks, conflicts) is not None) == expected, seed
    assert 15 < possible < 135


def test_a_lost_device_leaves_the_rest_of_its_node_usable():
    devices = tuple(d for d in parse_cluster("3x4xh100").devices if d.id != 5)
    line = Line(Cluster(devices, (ACCELERATORS["h100"],)))
    assert line.groups(0, 2, 5) == [0, 1, 2, 3, 4, 6, 8, 9, 10, 11]
    assert line.groups(0, 4, 2) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_the_strongest_type_comes_first_and_mixed_nodes_count_as_their_weakest():
    kinds = ["a100", "a100", "b200", "b200", "h100", "a100"]
    devices = tuple(Device(i, f"n{i // 2}", kind, ACCELERATORS[kind].memory_bytes) for i, kind in enumerate(kinds))
    line = Line(Cluster(devices, tuple(ACCELERATORS[k] for k in ("a100", "b200", "h100"))))
    assert [d.accelerator for d in line.devices] == ["b200", "b200", "h100", "a100", "a100", "a100"]
    assert [r.accelerator for r in line.regions] == ["b200", "b200", "h100", "h100", "a100", "a100"]
