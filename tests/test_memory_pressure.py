"""A job whose responses outgrow its memory goes on at once, where it is, under settings that need less."""

from datetime import timedelta
from pathlib import Path

from jobs import MAX_RESPONSE, SPEC, Rollouts, make_runtime, make_setup, numbers, plan_of

from nereus.controller import Adapting, Clock, Controller, Course
from nereus.decide.decider import Decider
from nereus.decide.outlook import JobShape, ModelOutlook
from nereus.decide.policies import POLICIES
from nereus.decide.policy import Dials
from nereus.model import Head
from nereus.plan import Role, Stage
from nereus.planner.prices.calibration import Calibration
from nereus.planner.workload import LengthSummary
from nereus.recipe.config import parse_config
from nereus.reports.control import Requests
from nereus.reports.events import Decision, Event, StepEnd, TransitionEnd, TriggerFired
from nereus.runtime.thread_pool import ThreadPool
from nereus.supply.supply import StaticSupply

PLACED = plan_of(
    actor_generation="d1@0/seqs=2",
    actor_training="d1@0/mb=9/recompute=none",
    critic_training="d1@0/mb=9/recompute=none",
    critic_inference="d1@0/mb=1",
    reference_inference="d1@0/mb=1",
)
CONFIG = parse_config(
    {
        "model": {"shape": {"hidden": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 40}},
        "data": {
            "train": {"reasoning_gym": "chain_sum"}, "val": {"reasoning_gym": "chain_sum"}, "tokenizer": "byte",
            "train_batch_size": 18, "max_prompt_length": 24 - MAX_RESPONSE, "max_response_length": MAX_RESPONSE,
        },
        "actor": {"ppo_mini_batch_size": 9, "ppo_epochs": 2},
        "reward": {"function": "nereus.data.rewards:exact_answer"},
        "warm_start": {"steps": 1},
        "trainer": {"dtype": "fp64"},
        "cluster": {"workers": 1},
        "adapt": True,
    }
)  # fmt: skip
SPECS = {Role.ACTOR: SPEC, Role.REFERENCE: SPEC, Role.CRITIC: SPEC.with_head(Head.SCORE)}
SHORT = LengthSummary(1.0, 1.0, 1.0, 4.0)


def pool_of(memory_bytes: int) -> ThreadPool:
    return ThreadPool(1, timeout=timedelta(seconds=60), memory_bytes=memory_bytes)


def outlook_of(pool: ThreadPool) -> ModelOutlook:
    return ModelOutlook(JobShape.of(CONFIG, SPECS, pool.cluster), Calibration(pool.cluster.accelerators))


def tight_bytes() -> int:
    """Memory of a device in which the plan fits with little to spare, as long as responses are short."""
    plenty = 1 << 30
    return int(1.1 * outlook_of(pool_of(plenty)).predict(PLACED, SHORT).memory_share * plenty)


def run(root: Path, memory_bytes: int, *, adapts: bool) -> tuple[Rollouts, list[Event], list[dict[str, float]]]:
    """Four steps whose responses are longer than they had been; (rollouts, events, numbers of every step)."""
    rollouts, pool, events = Rollouts(), pool_of(memory_bytes), list[Event]()
    setup = make_setup(root, rollouts, batch=18, mini_batch=9, reward_model=False)
    plan = outlook_of(pool).complete(PLACED)
    runtime, outlook = make_runtime(setup, plan, pool), outlook_of(pool)
    policy = POLICIES[CONFIG.admission](Dials(CONFIG.gamma, CONFIG.triggers.length, CONFIG.triggers.efficiency))
    decider = Decider(policy, outlook, plan, lengths=SHORT)
    try:
        Controller(
            runtime, outlook, Course(4, 0, {}), events.append, progress=lambda what, step, steps: None,
            requests=Requests(root), clock=Clock(lambda: 0.0),
            adapting=Adapting(StaticSupply((0,)), decider) if adapts else None,
        ).run()  # fmt: skip
    finally:
        runtime.close()
    return rollouts, events, [numbers(event.report.metrics) for event in events if isinstance(event, StepEnd)]


def test_a_job_that_outgrows_its_memory_computes_less_at_a_time_and_learns_the_same(tmp_path: Path) -> None:
    memory_bytes = tight_bytes()
    still, _, expected = run(tmp_path / "still", memory_bytes, adapts=False)
    rollouts, events, found = run(tmp_path / "pressed", memory_bytes, adapts=True)
    assert "memory" in {event.signal for event in events if isinstance(event, TriggerFired)}
    verdicts = [event.verdict for event in events if isinstance(event, Decision)]
    moves = [event for event in events if isinstance(event, TransitionEnd)]
    assert verdicts[0] == "urgent" and len(moves) == 1, verdicts
    before, after = moves[0].before, moves[0].after
    assert before.placed == after.placed and moves[0].report.bytes_moved == 0
    trained = [(before[m], after[m]) for m in after.model_stages if m.stage is Stage.TRAINING]
    assert any(b.micro_batch > a.micro_batch or a.recompute is not b.recompute for b, a in trained)
    assert rollouts.responses == still.responses
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            assert abs(ours[name] - value) <= 1e-9 * max(1.0, abs(value)), name
