"""A job that adapts while its supply flaps learns what it would have learned undisturbed, and its log replays."""

import dataclasses
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from jobs import MAX_RESPONSE, SPEC, Rollouts, make_runtime, make_setup, numbers, plan_of

from nereus.controller import Adapting, Clock, Controller, Course
from nereus.decide.outlook import JobShape, ModelOutlook, decider_of, recorded_decider
from nereus.decide.replay import recorded_decisions, replay, ruled_decisions
from nereus.model import Head
from nereus.plan import Role
from nereus.planner.prices.calibration import Calibration
from nereus.recipe.config import parse_config
from nereus.reports.control import Requests
from nereus.reports.events import Decision, Event, Start, StepEnd, SupplyChange, TransitionEnd, read_events
from nereus.reports.run_folder import RunFolder
from nereus.runtime.live import JobSetup
from nereus.runtime.thread_pool import ThreadPool
from nereus.supply.supply import TraceSupply
from nereus.supply.traces import trace_of_counts

NUM_DEVICES = 6
PLAN = plan_of(
    actor_generation="d2t1p1@0-1",
    actor_training="d1t2p1@0-1",
    critic_training="d1t1p2@2-3",
    critic_inference="d1t1p2@2-3",
    reference_inference="d1t1p1@0",
)
CONFIG = parse_config(
    {
        "model": {"shape": {"hidden": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 40}},
        "data": {
            "train": {"reasoning_gym": "chain_sum"}, "val": {"reasoning_gym": "chain_sum"}, "tokenizer": "byte",
            "train_batch_size": 6, "max_prompt_length": 24 - MAX_RESPONSE, "max_response_length": MAX_RESPONSE,
        },
        "rollout": {"max_num_seqs": 4},
        "actor": {"ppo_mini_batch_size": 3, "ppo_micro_batch_size": 2, "ppo_epochs": 2},
        "reward": {"function": "nereus.data.rewards:exact_answer"},
        "warm_start": {"steps": 1},
        "trainer": {"dtype": "fp64"},
        "cluster": {"workers": NUM_DEVICES},
        "adapt": True,
    }
)  # fmt: skip
"""The recipe of `make_setup`'s job, as planning and replay see it."""
SPECS = {Role.ACTOR: SPEC, Role.REFERENCE: SPEC, Role.CRITIC: SPEC.with_head(Head.SCORE)}

SHORT = [(0.0, 4), (3.0, 2), (6.0, 0), (6.5, 5), (9.0, 3)]
LONG = [
    (0.0, 4), (3.0, 6), (8.0, 3), (11.0, 5), (16.0, 2), (20.0, 4), (27.0, 0), (27.5, 3), (31.0, 6), (39.0, 2),
    (43.0, 5), (48.0, 3), (52.0, 6), (56.0, 4),
]  # fmt: skip
"""(steps done, devices): changes after 3 to 8 steps, between 2 and 6 devices, one drop to none."""


class StepClock:
    """Time that a step takes one second of, and a pause what it sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.pass_by)


@dataclasses.dataclass
class Told:
    """Every event of a run, in its folder and here; a step that ends moves the clock."""

    folder: RunFolder
    time: StepClock
    events: list[Event] = dataclasses.field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.folder.event(event)
        self.events.append(event)
        if isinstance(event, StepEnd):
            self.time.pass_by(1.0)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run did: its rollouts, its steps' numbers, its events."""

    rollouts: Rollouts
    events: Sequence[Event]
    log: Path

    @property
    def steps(self) -> list[dict[str, float]]:
        return [numbers(event.report.metrics) for event in self.events if isinstance(event, StepEnd)]


def run(folder: Path, setup: JobSetup, rollouts: Rollouts, num_steps: int, counts: Sequence[tuple[float, int]]) -> Run:
    """A run of the job of `setup`; with counts it adapts to them."""
    pool = ThreadPool(NUM_DEVICES, timeout=timedelta(seconds=60))
    runtime = make_runtime(setup, PLAN, pool)
    time, run_folder = StepClock(), RunFolder(folder)
    run_folder.open("")
    told = Told(run_folder, time)
    outlook = ModelOutlook(JobShape.of(CONFIG, SPECS, pool.cluster), Calibration(pool.cluster.accelerators))
    told(
        Start(
            0,
            config=CONFIG.model_dump(mode="json"),
            cluster=dataclasses.asdict(pool.cluster),
            models={role.value: dataclasses.asdict(spec) for role, spec in SPECS.items()},
            plan=PLAN,
            calibration=outlook.calibration.to_json(),
        )
    )
    adapting = None
    if counts:
        adapting = Adapting(TraceSupply(trace_of_counts(counts, seed=1)), decider_of(CONFIG, outlook, PLAN))
    try:
        Controller(
            runtime, outlook, Course(num_steps, 0, {}), told, progress=lambda what, step, steps: None,
            requests=Requests(folder), clock=time.clock, adapting=adapting,
        ).run()  # fmt: skip
    finally:
        runtime.close()
        run_folder.close()
    return Run(rollouts, told.events, folder / "events.jsonl")


def both(root: Path, num_steps: int, counts: Sequence[tuple[float, int]]) -> tuple[Run, Run]:
    """The undisturbed run and the one under the flapping supply."""
    runs = []
    for name, supply in (("still", []), ("flapping", counts)):
        rollouts = Rollouts()
        setup = make_setup(root / name, rollouts, batch=6, reward_model=False)
        runs.append(run(root / name / "run", setup, rollouts, num_steps, supply))
    return runs[0], runs[1]


def check_same(still: Run, flapping: Run, *, exact_steps: int) -> None:
    """The same tokens throughout; every number within 1e-9 up to `exact_steps` and within 1e-4 after them."""
    assert flapping.rollouts.responses == still.rollouts.responses
    assert len(flapping.steps) == len(still.steps)
    for step, (expected, found) in enumerate(zip(still.steps, flapping.steps, strict=True), start=1):
        assert found.keys() == expected.keys()
        tolerance = 1e-9 if step <= exact_steps else 1e-4
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"step {step}: {name}"


def check_story(flapping: Run, counts: Sequence[tuple[float, int]]) -> None:
    """Every step ran on devices that were there, every loss was urgent, and the drop to none went through a file."""
    devices: set[int] = set()
    for event in flapping.events:
        if isinstance(event, SupplyChange):
            devices = set(event.devices)
        if isinstance(event, StepEnd):
            assert set(event.plan.devices) <= devices, f"step {event.step}"
    assert sum(isinstance(event, SupplyChange) for event in flapping.events) == len(counts)
    moves = [event for event in flapping.events if isinstance(event, TransitionEnd)]
    assert [event.report.mode for event in moves].count("restart") == 1
    assert sum(event.report.mode != "restart" and event.report.verified for event in moves) >= 2
    assert {event.verdict for event in flapping.events if isinstance(event, Decision)} >= {"urgent"}


def check_replay(log: Path) -> None:
    """The log alone, read with the real planner, comes to every trigger and verdict again, bit for bit."""
    lines = read_events(log)
    decided = recorded_decisions(lines)
    again = json.loads(json.dumps(ruled_decisions(replay(lines, recorded_decider))))
    assert decided and again == decided


def test_a_short_run_under_a_flapping_supply_learns_the_same_and_replays(tmp_path: Path) -> None:
    still, flapping = both(tmp_path, 12, SHORT)
    check_same(still, flapping, exact_steps=12)
    check_story(flapping, SHORT)
    check_replay(flapping.log)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixty_steps_under_a_flapping_supply_learn_the_same_and_replay(tmp_path: Path) -> None:
    still, flapping = both(tmp_path, 60, LONG)
    check_same(still, flapping, exact_steps=20)
    check_story(flapping, LONG)
    check_replay(flapping.log)
