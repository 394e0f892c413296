"""The outlook of a small job on processor workers, against the planner and against a hidden truth."""

import dataclasses
import json
import random

import pytest

from nereus.cluster import ACCELERATORS, Cluster, uniform_cluster
from nereus.decide.outlook import WORKER_START_S, JobShape, ModelOutlook, decider_of, recorded_decider
from nereus.decide.replay import recorded_decisions, replay, ruled_decisions
from nereus.decide.ruling import Action, supply_event
from nereus.model import ModelSpec
from nereus.plan import ACTOR_TRAINING, Layout, Plan, Recompute, Role, Stage
from nereus.planner.evaluate import complete, price
from nereus.planner.prices.calibration import Calibration
from nereus.planner.search.optimum import search
from nereus.planner.workload import LengthSummary
from nereus.recipe.config import parse_config
from nereus.reports.events import Start, StepEnd, TransitionEnd, read_events
from nereus.reports.run_folder import RunFolder
from nereus.runtime.seam import StepReport
from nereus.supply.supply import SupplyView
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible, Mode, TransitionReport

RECIPE = {
    "model": {"shape": {"hidden": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn": 336}},
    "data": {
        "train": {"reasoning_gym": "chain_sum"}, "val": {"reasoning_gym": "chain_sum"}, "tokenizer": "byte",
        "train_batch_size": 32, "max_prompt_length": 32, "max_response_length": 64,
    },
    "actor": {"ppo_mini_batch_size": 8, "ppo_micro_batch_size": 8},
    "rollout": {"n": 2, "max_num_seqs": 64},
    "reward": {"function": "nereus.data.rewards:exact_answer"},
    "warm_start": {"steps": 1},
    "cluster": {"workers": 6},
    "adapt": True,
    "plan": {
        "actor-generation": "d1t2p1@0-1", "actor-training": "d1t1p2@0-1", "critic-training": "d1t2p1@2-3",
        "critic-inference": "d1t2p1@2-3", "reference-inference": "d1t1p1@0",
    },
}  # fmt: skip
CONFIG = parse_config(RECIPE)
SPEC = CONFIG.model.shape.spec(vocab=384)
SPECS: dict[Role, ModelSpec] = {role: SPEC for role in (Role.ACTOR, Role.CRITIC, Role.REFERENCE)}
CLUSTER = uniform_cluster(num_nodes=1, devices_per_node=6, accelerator=ACCELERATORS["cpu"], cores_per_node=2)
LENGTHS = LengthSummary(24.0, 40.0, 60.0, 20.0)


def job(**changes):
    return JobShape.of(parse_config(RECIPE | changes), SPECS, CLUSTER)


def outlook(calibration=None, **changes):
    return ModelOutlook(job(**changes), calibration or Calibration(CLUSTER.accelerators))


def test_a_prediction_is_the_planner_s_price_of_the_engine_s_settings():
    found = outlook().predict(CONFIG.initial_plan, LENGTHS)
    own = outlook()
    problem = own._problem(CLUSTER.restricted(CONFIG.initial_plan.devices), LENGTHS, own.calibration)
    told = {
        Stage.GENERATION: {"max_num_seqs": 64},
        Stage.INFERENCE: {"micro_batch": 8},
        Stage.TRAINING: {"micro_batch": 8, "recompute": Recompute.NONE},
    }
    plan = Plan.of({m: stage_plan.with_settings(**told[m.stage]) for m, stage_plan in CONFIG.initial_plan.stages})
    expected = price(problem, plan)
    assert found.step_s == expected.step_seconds and found.memory_share == expected.memory_share
    assert 0 < found.memory_share < 1


@pytest.mark.parametrize("recompute", list(Recompute))
def test_the_recipe_s_recomputation_is_priced_and_no_other_is_searched(recompute):
    own = outlook(trainer={"recompute": recompute.value})
    problem = own._problem(CLUSTER, LENGTHS, own.calibration)
    priced = price(problem, CONFIG.initial_plan)
    assert {m.name: stage.recompute for m, stage in priced.stages.items() if stage.recompute is not Recompute.NONE} == (
        {} if recompute is Recompute.NONE else {"actor-training": recompute, "critic-training": recompute}
    )
    found = search(problem)
    assert {p.recompute for m, p in found.plan.stages if m.stage is Stage.TRAINING} == {recompute}


def test_no_other_micro_batch_or_slots_than_the_recipe_s_are_searched():
    own = outlook(rollout={"n": 2, "max_num_seqs": 3})
    found = search(own._problem(CLUSTER, LENGTHS, own.calibration))
    assert {(m.stage is Stage.GENERATION, p.max_num_seqs, p.micro_batch) for m, p in found.plan.stages} == {
        (True, 3, None), (False, None, 8)
    }  # fmt: skip


def test_plans_lie_on_the_given_devices_and_the_first_is_no_slower_than_a_poor_one():
    own = outlook()
    plans = own.plans(CONFIG.initial_plan, LENGTHS, (0, 2, 3, 5))
    assert plans
    for plan in plans:
        CONFIG.workflow.check_plan(plan)
        assert set(plan.devices) <= {0, 2, 3, 5}
    best = own.plans(CONFIG.initial_plan, LENGTHS, range(6))[0]
    assert own.predict(best, LENGTHS).step_s <= own.predict(CONFIG.initial_plan, LENGTHS).step_s


def test_no_devices_give_no_plan_and_a_reason():
    own = outlook()
    assert own.plans(None, LENGTHS, ()) == []
    assert own.refusal


def test_moving_nowhere_is_free_and_moving_somewhere_takes_time():
    own = outlook()
    current = own.complete(CONFIG.initial_plan)
    inside = Plan.parse({"actor-training": "d2t1p2@0-3"}, base=current)
    outside = Plan.parse({"actor-training": "d2t1p2@0-1,4-5"}, base=current)
    assert own.assess(current, current).seconds == 0.0
    near, far = own.assess(current, inside), own.assess(current, outside)
    assert 0 < near.seconds < WORKER_START_S["cpu"] < far.seconds, "new devices need workers first"


def test_a_transition_that_no_memory_holds_is_infeasible_with_a_reason():
    tight = uniform_cluster(num_nodes=1, devices_per_node=6, accelerator=ACCELERATORS["cpu"])
    tight = dataclasses.replace(
        tight, devices=tuple(dataclasses.replace(d, memory_bytes=1_000_000) for d in tight.devices)
    )
    own = ModelOutlook(JobShape.of(CONFIG, SPECS, tight), Calibration())
    found = own.assess(CONFIG.initial_plan, Plan.parse({"actor-training": "d1@5"}, base=CONFIG.initial_plan))
    assert isinstance(found, Infeasible) and found.reason


def test_an_exchange_between_full_devices_needs_the_host_memory_that_the_recipe_gives():
    current = Plan.parse({"actor-training": "d1@0", "critic-training": "d1@1", "critic-inference": "d1@1",
                          "actor-generation": "d1@2", "reference-inference": "d1@3"},
                         base=CONFIG.initial_plan)  # fmt: skip
    target = Plan.parse({"actor-training": "d1@1", "critic-training": "d1@0", "critic-inference": "d1@0"}, base=current)
    state = job().states()[ACTOR_TRAINING]
    full = int(1.5 * state.buffer_bytes(Layout()).max())
    devices = tuple(dataclasses.replace(device, memory_bytes=full) for device in CLUSTER.devices)
    found = {}
    for host_memory_gb in (1, 0):
        shape = JobShape.of(parse_config(RECIPE | {"cluster": {"workers": 6, "host_memory_gb": host_memory_gb}}),
                            SPECS, dataclasses.replace(CLUSTER, devices=devices))  # fmt: skip
        found[host_memory_gb] = ModelOutlook(shape, Calibration()).assess(current, target)
    assert isinstance(found[1], Transition) and found[1].dag.mode is Mode.IN_PLACE
    assert isinstance(found[0], Infeasible) and "host memory has no room to stage it" in found[0].reason


def test_what_engines_hold_is_known_after_every_step_those_in_which_nothing_is_learned_too():
    """Memory that an engine holds is not to be had for a transition that is judged before the next step."""
    plan = CONFIG.initial_plan
    own = outlook(trainer={"critic_warmup": 5})
    deciding = decider_of(parse_config(RECIPE | {"trainer": {"critic_warmup": 5}}), own, plan)
    before = own.assess(plan, plan).table.limit_bytes
    measured = dataclasses.replace(truth(plan, LENGTHS, 1), engine_bytes={2: 12_345})
    deciding.boundary(1, SupplyView(tuple(range(6))))
    deciding.observe(measured)
    after = own.assess(plan, plan).table.limit_bytes
    assert (before - after).tolist() == [0, 0, 12_345, 0, 0, 0]


def test_a_transition_is_judged_on_the_devices_as_they_are_now():
    plan, own = CONFIG.initial_plan, outlook()
    target = Plan.parse({"actor-training": "d1t1p2@4-5"}, base=plan)
    near = own.assess(plan, target)
    devices = tuple(dataclasses.replace(d, node=f"node{d.id // 4}") for d in CLUSTER.devices)
    joined = dataclasses.replace(CLUSTER, devices=devices)
    own.recluster(joined)
    far = own.assess(plan, target)
    assert near.table.node.tolist() == [0] * 6 and far.table.node.tolist() == [0, 0, 0, 0, 1, 1]
    assert Cluster.from_json(json.loads(json.dumps(joined.to_json()))) == joined


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"actor-training": "d1t3@0-2"}, "heads"), ({"actor-training": "d1@9"}, "device 9 does not exist"),
     ({"reward-inference": "d1@0"}, "does not use")],
)  # fmt: skip
def test_a_plan_that_models_devices_or_workflow_do_not_admit_is_refused_with_the_reason(changes, problem):
    found = outlook().assess(CONFIG.initial_plan, Plan.parse(changes, base=CONFIG.initial_plan))
    assert isinstance(found, Infeasible) and problem in found.reason


def truth(plan, lengths, step, *, slow=1.0):
    """A measured step: what a differently calibrated model says, with noise."""
    hidden = outlook()
    draw = random.Random(step)
    problem = hidden._problem(CLUSTER.restricted(plan.devices), lengths, hidden.calibration)
    priced = price(problem, plan)
    factor = 3.0 * slow * draw.uniform(0.97, 1.03)
    return StepReport(
        step,
        0,
        {},
        priced.step_seconds * factor,
        {m: stage.cost.seconds * factor for m, stage in priced.stages.items()},
        lengths,
    )


def test_predictions_approach_what_is_measured_and_frozen_ones_stay():
    own, plan = outlook(), CONFIG.initial_plan
    own.freeze()
    before = own.predict(plan, LENGTHS)
    for step in range(1, 16):
        own.learn(plan, truth(plan, LENGTHS, step))
    assert own.predict(plan, LENGTHS).step_s == pytest.approx(truth(plan, LENGTHS, 99).step_s, rel=0.1)
    assert own.predict(plan, LENGTHS, frozen=True) == before


def recorded_run(folder, num_steps):
    calibration = Calibration(CLUSTER.accelerators)
    start = Start(
        0, config=CONFIG.model_dump(mode="json"), cluster=_plain(CLUSTER), plan=CONFIG.initial_plan,
        models={role.value: _plain(spec) for role, spec in SPECS.items()}, calibration=calibration.to_json(),
    )  # fmt: skip
    writer, draw = RunFolder(folder), random.Random(1)
    writer.open("")
    writer.event(start)
    deciding = decider_of(CONFIG, ModelOutlook(job(), calibration), CONFIG.initial_plan)
    shown, rulings = None, []
    for step in range(1, num_steps + 1):
        view = SupplyView(tuple(range(4 if step < 6 else 6 if step < 12 else 3)))
        if view != shown:
            writer.event(supply_event(step, view))
            shown = view
        ruling = deciding.boundary(step, view)
        rulings.append(ruling)
        for event in ruling.events:
            writer.event(event)
        if ruling.target is not None:
            seconds = draw.uniform(0.05, 0.2)
            done = TransitionReport((), "shadow", 0, 0, seconds, True)
            writer.event(TransitionEnd(step, ruling.current, ruling.target, done, ruling.transition.seconds))
            deciding.moved(ruling.target, seconds=seconds, predicted_s=ruling.transition.seconds)
        report = truth(deciding.plan, LengthSummary(20.0 + step, 36.0 + step, 60.0, 20.0), step)
        writer.event(StepEnd(step, deciding.plan, report, predicted_step_s=ruling.predicted_step_s))
        deciding.observe(report)
    writer.close()
    return rulings


def _plain(value):
    return json.loads(json.dumps(dataclasses.asdict(value)))


def test_a_run_on_real_prices_adapts_and_replays_bit_for_bit(tmp_path):
    rulings = recorded_run(tmp_path / "run", 20)
    events = read_events(tmp_path / "run" / "events.jsonl")
    again = list(replay(events, recorded_decider))
    assert again == rulings
    assert json.loads(json.dumps(ruled_decisions(again))) == recorded_decisions(events)
    urgent = [r for r in rulings if r.verdict and r.verdict.name == "urgent"]
    assert [r.step for r in urgent] == [12]
    assert any(r.action is Action.MOVE and r.verdict.name == "admit" for r in rulings)


def test_a_plan_is_completed_once_and_what_is_priced_is_what_is_judged():
    own = outlook(actor={"ppo_mini_batch_size": 8}, rollout={"n": 2})
    plan = own.complete(CONFIG.initial_plan)
    assert plan.is_complete and plan.placed == CONFIG.initial_plan
    assert own.complete(plan) == plan == own.assess(CONFIG.initial_plan, CONFIG.initial_plan).target
    kept = Plan.parse({"actor-training": "d1t1p2@0-1/mb=3/recompute=full"}, base=CONFIG.initial_plan)
    assert str(own.complete(kept)[ACTOR_TRAINING]) == "d1t1p2@0-1/mb=3/recompute=full"


def test_a_change_of_settings_alone_takes_as_long_as_joining_groups():
    own = outlook()
    current = own.complete(CONFIG.initial_plan)
    found = own.assess(current, Plan.parse({"actor-training": "d1t1p2@0-1/mb=3/recompute=full"}, base=current))
    assert not found.dag.operations and found.bytes_moved == 0
    assert found.seconds == found.rates.setup_s > 0


def test_a_plan_that_outgrows_its_memory_is_first_offered_other_settings_in_its_place():
    """Longer responses at fixed layouts: a smaller micro-batch, recomputation or fewer sequences at once fit again."""
    devices = tuple(dataclasses.replace(device, memory_bytes=24_000_000) for device in CLUSTER.devices)
    config = parse_config(RECIPE | {"actor": {"ppo_mini_batch_size": 8}, "rollout": {"n": 2}})
    own = ModelOutlook(JobShape.of(config, SPECS, dataclasses.replace(CLUSTER, devices=devices)), Calibration())
    short, long = LengthSummary(4.0, 8.0, 10.0, 20.0), LengthSummary(48.0, 60.0, 64.0, 20.0)
    plan = complete(own._problem(own.job.cluster, short, own.calibration), CONFIG.initial_plan)
    assert own.predict(plan, short).memory_share <= 1 < own.predict(plan, long).memory_share
    offered = [target for target in own.plans(plan, long, range(6)) if own.predict(target, long).memory_share <= 1]
    (settled,) = [target for target in offered if target.placed == plan.placed]
    leaner = [m for m, p in settled.stages if m.stage is Stage.TRAINING and (p.micro_batch, p.recompute) != (
        plan[m].micro_batch, plan[m].recompute)]  # fmt: skip
    assert leaner, "training was to need less"
