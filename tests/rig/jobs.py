"""A whole PPO job on tiny random models, run by threads of this process: every part real but Ray."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from nereus.algorithms.ppo import PPO
from nereus.algorithms.progress import Scores
from nereus.checkpoint.hf import init_folder
from nereus.data.prompts import Prompt, PromptOrder
from nereus.engines.sampling import SamplingParams
from nereus.engines.train import AdamW
from nereus.model import Head, ModelSpec
from nereus.plan import ModelStage, Plan, Role, Stage
from nereus.recipe.sections import ActorConfig, AlgorithmConfig, CriticConfig
from nereus.runtime.live import JobSetup, LiveRuntime
from nereus.runtime.thread_pool import ThreadPool
from nereus.runtime.worker import RoleSetup, Worker
from nereus.shards.boxes import Box
from nereus.shards.state import Counters, RankState, StateKind, shard_view, state_dtypes
from nereus.transition.judged import Transition, plan_transition
from nereus.transition.price import DeviceTable, Rates, StageState
from nereus.workflow import step_workflow

SPEC = ModelSpec(
    "llama", num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=40, vocab=61, max_positions=64
)
STOPS = (1, 2, 3, 4)
MAX_RESPONSE = 12


@dataclasses.dataclass
class Rollouts:
    """The reward of a job; remembers every response it is asked to score.

    A response scores the share of its tokens that are even.
    """

    responses: list[tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=list)

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> Scores:
        self.responses.append(tuple(tuple(response) for response in responses))
        return Scores(tuple(sum(t % 2 == 0 for t in r) / len(r) for r in responses))


def make_folders(root: Path) -> dict[Role, Path]:
    """An actor (also the reference) and a reward model with random weights, in HF layout."""
    folders = {Role.ACTOR: root / "actor", Role.REWARD: root / "reward"}
    if not folders[Role.REWARD].exists():
        init_folder(SPEC, folders[Role.ACTOR], seed=1)
        init_folder(SPEC.with_head(Head.SCORE), folders[Role.REWARD], seed=2)
    return {**folders, Role.CRITIC: folders[Role.ACTOR], Role.REFERENCE: folders[Role.ACTOR]}


def make_setup(
    root: Path,
    score: Rollouts,
    *,
    dtype: torch.dtype = torch.float64,
    batch: int = 7,
    mini_batch: int = 3,
    reward_model: bool = True,
    timeout_s: float = 60.0,
) -> JobSetup:
    """PPO over `batch` prompts a step in mini-batches of at most `mini_batch`, two epochs, KL penalty in the reward."""
    roles: dict[Role, RoleSetup] = {}
    for role, folder in make_folders(root).items():
        scalar, trains = role in (Role.CRITIC, Role.REWARD), role in (Role.ACTOR, Role.CRITIC)
        roles[role] = RoleSetup(
            SPEC.with_head(Head.SCORE) if scalar else SPEC,
            dtype,
            folder,
            max_tokens=24,
            optimizer=AdamW(functools.partial(_rate, peak=3e-3 if role is Role.ACTOR else 1e-2)) if trains else None,
            fresh_head=role is Role.CRITIC,
        )
    prompts = tuple(Prompt(i, tuple(5 + (i * k) % 50 for k in range(1, 3 + i % 7)), f"{i}", "", "") for i in range(20))
    return JobSetup(
        workflow=step_workflow("ppo", set(Role) - (set() if reward_model else {Role.REWARD})),
        algorithm=PPO(
            algorithm=AlgorithmConfig(kl_coef=0.05, lam=0.95),
            actor=ActorConfig(ppo_mini_batch_size=mini_batch, ppo_epochs=2, entropy_coeff=0.01),
            critic=CriticConfig(),
        ),
        roles=roles,
        prompts=prompts,
        val_prompts=prompts[:3],
        order=PromptOrder(len(prompts), seed=0),
        batch=batch,
        score=score,
        sampling=SamplingParams(MAX_RESPONSE, stop_ids=STOPS),
        seed=3,
        timeout=timedelta(seconds=timeout_s),
        checkpoints=root / "checkpoints",
    )


def _rate(updates: int, *, peak: float) -> float:
    return peak * min(1.0, (updates + 1) / 5)


def make_runtime(setup: JobSetup, plan: Plan, pool: ThreadPool) -> LiveRuntime:
    """A started job."""
    runtime = LiveRuntime(pool, setup, plan)
    runtime.start()
    return runtime


def judged(
    runtime: LiveRuntime,
    setup: JobSetup,
    target: Plan,
    *,
    engine_bytes: Mapping[int, int] | None = None,
    host_bytes_per_node: int | None = None,
    device_bytes: int | None = None,
) -> Transition:
    """The transition of a job to another plan, as its outlook would judge it; fails where there is none.

    engine_bytes: by device, what engines hold beside the state. device_bytes: what each device is taken to have.
    """
    cluster = runtime.cluster
    if device_bytes is not None:
        devices = tuple(dataclasses.replace(device, memory_bytes=device_bytes) for device in cluster.devices)
        cluster = dataclasses.replace(cluster, devices=devices)
    states = {
        m: StageState(setup.roles[m.role].spec, sum(dtype.itemsize for dtype in state_kinds(setup, m).values()))
        for m in setup.workflow.model_stages
    }
    table = DeviceTable.of(cluster, reserved_bytes=engine_bytes, host_bytes_per_node=host_bytes_per_node)
    found = plan_transition(runtime.plan, target, states=states, table=table, rates=Rates.of(runtime.cluster))
    assert isinstance(found, Transition), found
    return found


def state_kinds(setup: JobSetup, model_stage: ModelStage) -> dict[StateKind, torch.dtype]:
    """What a model-stage holds."""
    return state_dtypes(setup.roles[model_stage.role].dtype, trains=model_stage.stage is Stage.TRAINING)


PARAM = StateKind.PARAM
Whole = dict[tuple[ModelStage, str, StateKind], torch.Tensor]


def gathered(pool: ThreadPool, plan: Plan, epoch: int) -> tuple[Whole, dict[ModelStage, Counters]]:
    """Every logical tensor of every model-stage put together from the boxes of its units, and the counters.

    Fails where two ranks hold different values for one element, or a box is not covered.
    """
    whole: Whole = {}
    counters: dict[ModelStage, Counters] = {}
    for model_stage in plan.model_stages:
        shared = plan.holder(model_stage) != model_stage
        for state in states(pool, plan, epoch, model_stage).values():
            assert counters.setdefault(model_stage, state.counters) == state.counters, "units of different updates"
            for shard in state.shards:
                slices = shard.box.within(Box.whole(shard.param.shape))
                for kind, flat in state.flats.items() if not shared else [(PARAM, state.flats[PARAM])]:
                    full = torch.full(shard.param.shape, torch.nan, dtype=flat.dtype)
                    full = whole.setdefault((model_stage, shard.param.name, kind), full)
                    part, seen = shard_view(flat, shard), full[slices]
                    assert torch.equal(torch.where(seen.isnan(), part, seen), part), f"replicas of {shard.param.name}"
                    seen.copy_(part)
    assert not any(tensor.isnan().any() for tensor in whole.values()), "an element that nobody holds"
    return whole, counters


def states(pool: ThreadPool, plan: Plan, epoch: int, model_stage: ModelStage) -> dict[int, RankState]:
    """What each device of a model-stage holds for it, read where it lies."""
    holder = plan.holder(model_stage)
    return {d: pool.call(d, _state, epoch, holder).result(30) for d in plan[model_stage].devices}


def _state(worker: Worker, epoch: int, holder: ModelStage) -> RankState:
    return worker.residents.state(epoch, holder)


def plan_of(**stages: str) -> Plan:
    """A plan of `actor_training="d1t2p1@0-1"` and so on, with small settings where it names none."""
    return Plan.parse(_settled(stages))


def changed(plan: Plan, **stages: str) -> Plan:
    """The plan with some model-stages moved."""
    return Plan.parse(_settled(stages), base=plan)


def _settled(stages: Mapping[str, str]) -> dict[str, str]:
    """Two samples computed, four sequences decoded at a time: a unit's share takes several rounds."""
    return {
        name.replace("_", "-"): text if "/" in text else f"{text}/{'seqs=4' if 'generation' in name else 'mb=2'}"
        for name, text in stages.items()
    }


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a step computed, without what a clock measured."""
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}
