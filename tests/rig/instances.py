"""Random planning instances: tables of arbitrary numbers on small clusters, and whole problems of small models."""

import random

from nereus.cluster import ACCELERATORS, Cluster, Device, uniform_cluster
from nereus.engine_facts import BF16
from nereus.model import Head, ModelSpec
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    Recompute,
    Role,
)
from nereus.planner.placement import Placement
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.cost import CostModel
from nereus.planner.problem import Limits, PlanningProblem
from nereus.planner.space.candidates import Candidate, Candidates
from nereus.planner.space.line import Line
from nereus.planner.workload import Lengths, Workload
from nereus.workflow import step_workflow

WAVES = {
    ACTOR_GENERATION: (0,),
    REFERENCE_INFERENCE: (1,),
    REWARD_INFERENCE: (1,),
    CRITIC_INFERENCE: (1,),
    CRITIC_TRAINING: (2,),
    ACTOR_TRAINING: (1, 2),
}
STAGE_SETS = (
    (ACTOR_GENERATION, ACTOR_TRAINING),
    (ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE),
    (ACTOR_GENERATION, REFERENCE_INFERENCE, CRITIC_INFERENCE, CRITIC_TRAINING, ACTOR_TRAINING),
    (ACTOR_GENERATION, REFERENCE_INFERENCE, REWARD_INFERENCE, CRITIC_INFERENCE, CRITIC_TRAINING, ACTOR_TRAINING),
)


def random_cluster(rng, max_devices):
    """Up to `max_devices` devices: equal nodes, or uneven nodes of one or two types, some mixed inside."""
    if rng.random() < 0.6:
        size = rng.choice([2, 3, 4, 8])
        count = rng.randint(1, max(1, max_devices // size))
        return uniform_cluster(num_nodes=count, devices_per_node=size, accelerator=ACCELERATORS["h100"])
    types, devices, node = rng.sample(["a100", "h100", "h200", "b200"], rng.choice([1, 2])), [], 0
    while len(devices) < rng.randint(3, max_devices):
        kind, mixed = rng.choice(types), rng.random() < 0.2
        for _ in range(rng.randint(1, 5)):
            name = rng.choice(types) if mixed else kind
            devices.append(Device(len(devices), f"n{node}", name, ACCELERATORS[name].memory_bytes))
        node += 1
    devices = devices[:max_devices]
    return Cluster(tuple(devices), tuple(ACCELERATORS[name] for name in sorted({d.accelerator for d in devices})))


class TablePrice:
    """Synchronization prices that depend on both shapes without any order."""

    def __init__(self, scale):
        self.scale = scale

    def matrix(self, source, sources, targets):
        ours = sources.tp * 7 + sources.pp * 3 + sources.dp * 5
        mixed = ours[:, None] + targets.tp * 11 + targets.pp * 13 + targets.dp * 2
        return self.scale * (mixed % 17) / 10.0

    def classes(self, sources, targets):
        return sources.shape_keys, targets.shape_keys


def random_tables(seed):
    """(cluster, line, tables, syncs, sync price, placement) of arbitrary numbers; memory binds in many."""
    rng = random.Random(seed)
    stages = rng.choice(STAGE_SETS)
    cluster = random_cluster(rng, {2: 16, 3: 16, 5: 10, 6: 7}[len(stages)])
    line = Line(cluster)
    shapes = [(rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3, 4])) for _ in range(6)]
    integral, share = rng.random() < 0.3, rng.choice([0.02, 0.15, 0.3, 0.5])
    tables = {}
    for model_stage in stages:
        rows = [
            _random_candidate(rng, model_stage, line, shapes, integral, share)
            for _ in range({2: 12, 3: 8, 5: 4, 6: 3}[len(stages)])
        ]
        tables[model_stage] = Candidates.of(model_stage, rows, num_waves=3)
    syncs = [(ACTOR_TRAINING, ACTOR_GENERATION)]
    if CRITIC_TRAINING in stages:
        syncs.append((CRITIC_TRAINING, CRITIC_INFERENCE))
    return cluster, line, tables, syncs, TablePrice(rng.random()), rng.choice(list(Placement))


def _random_candidate(rng, model_stage, line, shapes, integral, share):
    tp, pp, dp = rng.choice(shapes) if rng.random() < 0.7 else (rng.choice([1, 2, 4]), 1, rng.randint(1, 4))
    seconds = [0.0, 0.0, 0.0]
    for wave in WAVES[model_stage]:
        seconds[wave] = rng.randint(1, 5) * 1.0 if integral else rng.random() * 10 / (tp * pp * dp) + 0.01
    idle = int(line.max_capacity * rng.random() * share)
    active = idle + int(line.max_capacity * rng.random() * share * 1.5)
    shared_idle = int(idle * rng.random())
    shared_active = shared_idle + int((active - idle) * rng.random())
    grain = tp * pp if (tp + pp + dp) % 3 == 0 else tp
    return Candidate(
        Layout(tp, pp), dp, 1, Recompute.NONE, tuple(seconds), active, idle, shared_active, shared_idle, grain,
        rng.randrange(len(line.regions)),
    )  # fmt: skip


def tiny_spec(*, layers=2, heads=4, hidden=1024, ffn=2816, vocab=32000):
    return ModelSpec(
        family="llama", num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=heads // 2 or 1,
        head_dim=hidden // heads, ffn=ffn, vocab=vocab,
    )  # fmt: skip


def random_problem(seed):
    """A whole problem of small models on up to 16 devices, with a memory cap that binds in many."""
    rng = random.Random(seed)
    critic = rng.random() < 0.35
    spec = tiny_spec(
        layers=rng.choice([1, 2, 3]), heads=rng.choice([2, 4, 6]), hidden=rng.choice([768, 1536, 3072]),
        vocab=rng.choice([4000, 32000, 152064]),
    )  # fmt: skip
    size = rng.choice([1, 2, 4])
    nodes = rng.randint(1, 4 // size if critic else 16 // size // (1 if size > 1 else 2))
    cluster = uniform_cluster(num_nodes=nodes, devices_per_node=size, accelerator=ACCELERATORS["a100"])
    lengths = Lengths(tuple(sorted(rng.uniform(10, 2000) for _ in range(rng.randint(1, 8)))))
    workload = Workload(rng.choice([2, 3, 6, 8]), 128, lengths, mini_batches=rng.choice([1, 1, 2]))
    specs = {Role.ACTOR: spec, Role.REFERENCE: spec, Role.CRITIC: spec.with_head(Head.SCORE)}
    state = spec.num_params * 18
    used = {Role.ACTOR, Role.CRITIC} if critic else {Role.ACTOR}
    if rng.random() < 0.5 and not critic:
        used.add(Role.REFERENCE)
    return PlanningProblem(
        workflow=step_workflow("random", used),
        specs=specs, cluster=cluster, workload=workload, precision=BF16, cost=CostModel(cluster, Calibration()),
        limits=Limits(int(state * rng.uniform(0.3, 4)) + (1 << 28), placement=rng.choice([*Placement])),
    )  # fmt: skip
