"""Whole courses of boundaries on a written table of plans, and the replay of what they recorded."""

import dataclasses
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_outlook import TableOutlook, lengths, plan_on, report

from nereus.decide.admission import Admit, Decline, Urgent
from nereus.decide.decider import Decider
from nereus.decide.policies import POLICIES
from nereus.decide.policies.nereus import NereusPolicy
from nereus.decide.policy import Dials
from nereus.decide.replay import recorded_decisions, replay, ruled_decisions
from nereus.decide.ruling import Action, supply_event
from nereus.decide.triggers import Signal
from nereus.plan import Plan
from nereus.reports.events import Start, StepEnd, TransitionEnd, TransitionFailed, read_events
from nereus.reports.run_folder import RunFolder
from nereus.supply.supply import Announcement, SupplyView
from nereus.transition.operations import TransitionReport

FOUR = SupplyView((0, 1, 2, 3))


def decider(outlook=None, *, mode="nereus", gamma=0.5, plan=None, devices=(0, 1, 2, 3)):
    plan = plan or plan_on(*devices)
    return Decider(POLICIES[mode](Dials(gamma)), outlook or TableOutlook(), plan, lengths=lengths())


def run(deciding, steps, *, view=FOUR, mean=lambda step: 100.0, noise=lambda step: 1.0, first=1, slow=lambda step: 1.0):
    """Rulings of a run on the table's own times; every move is made at once and takes what was predicted."""
    rulings = []
    for step in range(first, first + steps):
        ruling = deciding.boundary(step, view(step) if callable(view) else view)
        rulings.append(ruling)
        if ruling.target is not None:
            numbers = ruling.verdict.numbers
            told(deciding, ruling, seconds=numbers.transition_s if numbers else None)
        if deciding.plan is not None:
            step_s = 0.04 * mean(step) / len(deciding.plan.devices) * noise(step) * slow(step)
            deciding.observe(report(step, step_s, mean(step)))
    return rulings


def told(deciding, ruling, *, seconds):
    """Say that the target of a ruling was reached, and what its transition was predicted to take."""
    predicted_s = ruling.transition.seconds if ruling.transition else 0.0
    deciding.moved(ruling.target, seconds=seconds, predicted_s=predicted_s)


def verdicts(rulings):
    return [(r.step, r.verdict.name) for r in rulings if r.verdict and not r.again]


def test_a_quiet_run_on_the_best_plan_never_moves():
    rulings = run(decider(), 50)
    assert [r.action for r in rulings] == [Action.KEEP] * 50
    assert [t.signal for r in rulings for t in r.triggers] == [Signal.START]


@pytest.mark.parametrize("seed", range(4))
def test_noise_below_the_thresholds_never_moves_a_run(seed):
    draw = random.Random(seed)
    length = [100 * draw.uniform(0.9, 1.1) for _ in range(201)]
    jitter = [draw.uniform(0.94, 1.06) for _ in range(201)]
    outlook = TableOutlook()
    rulings = run(decider(outlook), 200, mean=length.__getitem__, noise=jitter.__getitem__)
    assert all(r.action is Action.KEEP for r in rulings)
    assert outlook.searches == 1, "only the first examination searches"


def test_a_poor_first_plan_is_left_once_the_wait_has_paid_for_the_move():
    outlook = TableOutlook(transition_s=3.0)
    rulings = run(decider(outlook, plan=plan_on(0, 1)), 12)
    # Two devices take 2 s a step, four 1 s: 3 s pay back in 3 steps, which needs a horizon of 6.
    moved = [r for r in rulings if r.action is Action.MOVE]
    assert [(r.step, r.again, type(r.verdict)) for r in moved] == [(10, True, Admit)]
    assert [r.step for r in rulings if isinstance(r.verdict, Decline)] == [4, 5, 6, 7, 8, 9]
    assert outlook.searches == 1
    assert moved[0].verdict.numbers.horizon_steps == 6.0


def test_the_paper_s_rule_refuses_one_lasting_change_for_ever():
    rulings = run(decider(TableOutlook(transition_s=3.0), mode="paper"), 200, view=lambda s: growing(s, at=5))
    assert verdicts(rulings) == [(5, "decline")]
    assert rulings[4].verdict.numbers.horizon_steps == 1.0
    assert all(r.action is Action.KEEP for r in rulings)


def test_the_default_admits_the_same_lasting_change_as_soon_as_it_pays():
    rulings = run(decider(TableOutlook(transition_s=2.95)), 200, view=lambda s: growing(s, at=5))
    moved = [r.step for r in rulings if r.action is Action.MOVE]
    # 1 s on four, 0.8 s on five: 14.75 steps of payback need a horizon of 29.5.
    assert moved == [35]


def test_a_cheap_move_made_first_does_not_forget_the_better_one():
    class Cheap(TableOutlook):
        def assess(self, current, target):
            found = super().assess(current, target)
            return dataclasses.replace(found, move_s=0.01) if len(target.devices) == 3 else found

    deciding = decider(Cheap(transition_s=2.99, extra=(plan_on(0, 1, 2),)), plan=plan_on(0, 1))
    moved = [(r.step, len(r.target.devices)) for r in run(deciding, 40) if r.target]
    # From 4/3 s a step to 1 s pays back in 8.97 steps, which needs a horizon of 18 after the examination before step 4.
    assert moved == [(4, 3), (22, 4)]


def growing(step, *, at):
    return SupplyView((0, 1, 2, 3, 4)) if step >= at else FOUR


@given(saving=st.floats(1.05, 4.0), cost=st.floats(0.01, 50.0))
@settings(max_examples=40, deadline=None)
def test_no_lasting_gain_is_refused_longer_than_its_payback_asks(saving, cost):
    class Twice(TableOutlook):
        def predict(self, plan, lengths, *, frozen=False):
            found = super().predict(plan, lengths, frozen=frozen)
            return dataclasses.replace(found, step_s=1.0 if len(plan.devices) == 4 else 1.0 / saving)

        def learn(self, plan, report):
            pass

    deciding = decider(Twice(transition_s=cost))
    needed = cost / (1 - 1 / saving) / 0.5
    for step in range(1, 10_000):
        ruling = deciding.boundary(step, growing(step, at=5))
        if ruling.target:
            break
        deciding.observe(report(step, 1.0))
    assert ruling.step <= 5 + max(needed, 1) + 1


def test_two_crossings_give_the_paper_a_horizon_that_admits():
    rulings = run(
        decider(TableOutlook(transition_s=0.5), mode="paper"), 40, view=lambda s: growing(s, at=30) if s != 10 else
        SupplyView((0, 1, 2, 3, 5)),
    )  # fmt: skip
    supply = [r for r in rulings if any(t.signal is Signal.SUPPLY for t in r.triggers)]
    assert [(r.step, r.verdict.name) for r in supply] == [(10, "decline"), (11, "decline"), (30, "admit")]
    assert supply[2].verdict.numbers.horizon_steps == (1 + 19) / 2


def test_a_lost_device_moves_the_run_at_once_whatever_gamma():
    for mode in ("nereus", "paper"):
        rulings = run(decider(TableOutlook(transition_s=900.0), mode=mode, gamma=0.0), 8, view=lambda s: (
            FOUR if s < 5 else SupplyView((0, 1, 2)))
        )  # fmt: skip
        moved = [r for r in rulings if r.action is Action.MOVE]
        assert [(r.step, type(r.verdict)) for r in moved] == [(5, Urgent)]
        assert moved[0].target == plan_on(0, 1, 2)
        assert "device 3" in moved[0].verdict.reason


def test_gamma_zero_admits_nothing_but_urgent_moves():
    rulings = run(decider(TableOutlook(transition_s=0.0), gamma=0.0), 100, view=lambda s: growing(s, at=5))
    assert all(r.action is Action.KEEP for r in rulings)


def test_losing_an_idle_device_is_no_reason_to_move():
    view = SupplyView((0, 1, 2, 3, 4))
    deciding = decider(TableOutlook(transition_s=1e6), devices=view.devices, plan=plan_on(0, 1, 2, 3))
    rulings = run(deciding, 10, view=lambda s: view if s < 5 else FOUR)
    assert [r.action for r in rulings] == [Action.KEEP] * 10
    assert rulings[4].triggers[0].signal is Signal.SUPPLY


def test_lengths_that_outgrow_memory_move_the_run_before_they_do():
    outlook = TableOutlook(bytes_per_token=1 / 100)
    rulings = run(
        decider(outlook, plan=plan_on(0, 1), devices=(0, 1, 2, 3), gamma=0.0), 30,
        mean=lambda step: 40 + 2 * step if step < 25 else 90.0,
    )  # fmt: skip
    moved = [r for r in rulings if r.action is Action.MOVE]
    assert isinstance(moved[0].verdict, Urgent)
    assert moved[0].triggers[0].signal is Signal.MEMORY
    assert moved[0].target == plan_on(0, 1, 2, 3)


def test_an_urgent_move_that_cannot_be_made_restarts_from_saved_state():
    outlook = TableOutlook(infeasible=frozenset({plan_on(0, 1, 2)}))
    rulings = run(decider(outlook), 6, view=lambda s: FOUR if s < 5 else SupplyView((0, 1, 2)))
    assert (rulings[4].action, rulings[4].target) == (Action.RESTART, plan_on(0, 1, 2))
    assert "device 0 has no room" in rulings[4].verdict.reason


def test_an_infeasible_target_falls_back_to_a_slower_one():
    outlook = TableOutlook(infeasible=frozenset({plan_on(0, 1, 2)}), extra=(plan_on(0, 1), plan_on(2)))
    rulings = run(decider(outlook), 5, view=lambda s: FOUR if s < 5 else SupplyView((0, 1, 2)))
    assert (rulings[4].action, rulings[4].target) == (Action.MOVE, plan_on(0, 1))


def test_no_devices_pause_the_run_and_the_first_ones_start_it_again():
    deciding = decider()
    run(deciding, 4)
    paused = deciding.boundary(5, SupplyView(()))
    still = deciding.boundary(5, SupplyView((), (Announcement((0,), 5.0, leaving=False),)))
    back = deciding.boundary(5, SupplyView((1, 2)))
    assert (paused.action, still.action, back.action) == (Action.PAUSE, Action.KEEP, Action.RESTART)
    assert isinstance(back.verdict, Urgent) and back.target == plan_on(1, 2)
    deciding.moved(back.target)
    assert deciding.boundary(6, SupplyView((1, 2))).action is Action.KEEP


def aborting(deciding, steps, view, *, first):
    """Rulings of a run in which every live transition aborts."""
    rulings = []
    for step in range(first, first + steps):
        rulings.append(ruling := deciding.boundary(step, view))
        if ruling.action is Action.MOVE:
            deciding.aborted(ruling.target, step)
        elif ruling.action is Action.RESTART:
            deciding.moved(ruling.target)
        deciding.observe(report(step, 4 / len(deciding.plan.devices)))
    return rulings


def test_an_urgent_move_is_tried_again_at_once_and_then_goes_through_saved_state():
    deciding = decider()
    run(deciding, 4)
    rulings = aborting(deciding, 4, SupplyView((0, 1, 2)), first=5)
    assert [r.action for r in rulings] == [Action.MOVE, Action.MOVE, Action.RESTART, Action.KEEP]
    assert "moving there was aborted 2 times, last before step 6" in rulings[2].verdict.reason


def test_an_urgent_move_that_aborts_twice_gives_way_to_a_slower_one_that_can_be_made_live():
    deciding = decider(TableOutlook(extra=(plan_on(0, 1),)))
    run(deciding, 4)
    rulings = aborting(deciding, 5, SupplyView((0, 1, 2)), first=5)
    assert [len(r.target.devices) for r in rulings[:5]] == [3, 3, 2, 2, 3]
    assert [r.action for r in rulings[:5]] == [Action.MOVE] * 4 + [Action.RESTART]


def test_memory_that_an_aborted_move_was_to_relieve_is_urgent_again_at_the_next_boundary():
    deciding = decider(TableOutlook(bytes_per_token=1 / 100), plan=plan_on(0, 1))
    run(deciding, 3, mean=lambda step: 60.0)
    deciding.observe(report(4, 1.2, 80.0))
    rulings = aborting(deciding, 3, FOUR, first=5)
    assert [[t.signal for t in r.triggers if t.signal is Signal.MEMORY] for r in rulings] == [[Signal.MEMORY]] * 3
    assert [r.action for r in rulings] == [Action.MOVE, Action.MOVE, Action.RESTART]


@given(steps=st.integers(1, 400))
@settings(max_examples=20, deadline=None)
def test_a_move_for_profit_that_always_aborts_is_tried_ever_more_rarely(steps):
    deciding = decider(TableOutlook(transition_s=0.0))
    rulings = aborting(deciding, steps, SupplyView((0, 1, 2, 3, 4)), first=1)
    tried = [r.step for r in rulings if r.action is Action.MOVE]
    assert [after - before for before, after in itertools.pairwise(tried)] == [2**n for n in range(1, len(tried))]
    assert steps < 4 or tried
    assert not tried or steps < tried[-1] + 2 ** len(tried), "it is tried as soon as its wait is over"


def test_an_announced_loss_bounds_the_horizon_so_that_nothing_is_paid_for_a_plan_it_undoes():
    def view(step):
        leaving = (Announcement((4,), 100.0 - step),) if step >= 5 else ()
        return SupplyView((0, 1, 2, 3, 4) if 5 <= step < 100 else (0, 1, 2, 3), leaving)

    outlook = TableOutlook(transition_s=15.0)
    rulings = run(decider(outlook), 95, view=view)
    assert all(r.action is Action.KEEP for r in rulings)
    bounded = [r.verdict for r in rulings if r.verdict and "device 4 leaves" in r.verdict.reason]
    assert bounded


def test_announced_devices_are_left_at_the_last_boundary_before_their_deadline():
    def view(step):
        now_s = step - 1.0
        return SupplyView((0, 1, 2, 3), (Announcement((3,), 20.5 - now_s),) if step >= 5 and now_s < 20.5 else ())

    rulings = run(decider(), 30, view=lambda s: view(s) if s - 1 < 20.5 else SupplyView((0, 1, 2)))
    moved = [r for r in rulings if r.action is Action.MOVE]
    assert [type(r.verdict) for r in moved] == [Urgent]
    assert 17 <= moved[0].step <= 20
    assert moved[0].target == plan_on(0, 1, 2)


@pytest.mark.parametrize(("transition_s", "left"), [(0.0, 20), (3.0, 14), (6.0, 8), (30.0, 1)])
def test_the_longer_moving_is_predicted_to_take_the_earlier_announced_devices_are_left(transition_s, left):
    """Steps of 1 s, a deadline after 20.5 s: left before the first step after which two moves would not fit."""

    def view(step):
        return SupplyView((0, 1, 2, 3), (Announcement((3,), 20.5 - (step - 1)),))

    outlook = TableOutlook(transition_s=transition_s)
    rulings = run(decider(outlook), 20, view=view)
    assert [(r.step, r.target) for r in rulings if r.action is Action.MOVE] == [(left, plan_on(0, 1, 2))]
    assert outlook.searches <= 6, "moving off is searched anew at a replan or a move, not at every boundary"


def test_before_the_first_step_the_predicted_one_says_whether_there_is_time_for_it():
    soon = SupplyView((0, 1, 2, 3), (Announcement((3,), 1.4),))
    later = SupplyView((0, 1, 2, 3), (Announcement((3,), 1.6),))
    assert decider(TableOutlook(transition_s=0.0)).boundary(1, soon).target == plan_on(0, 1, 2)
    assert decider(TableOutlook(transition_s=0.0)).boundary(1, later).target is None


def test_no_move_is_counted_for_announced_devices_that_the_plan_does_not_use():
    view = SupplyView((0, 1, 2, 3), (Announcement((3,), 10.0),))
    outlook = TableOutlook(transition_s=100.0)
    ruling = decider(outlook, plan=plan_on(0, 1, 2)).boundary(1, view)
    assert not ruling.triggers and outlook.searches == 0


def test_slower_devices_fire_the_efficiency_trigger_and_lengths_do_not():
    slow = run(decider(), 30, slow=lambda step: 1.0 if step < 15 else 1.5)
    long = run(decider(), 30, mean=lambda step: 100.0 if step < 15 else 125.0)
    assert [t.signal for r in slow for t in r.triggers] == [Signal.START, Signal.EFFICIENCY]
    assert [t.signal for r in long for t in r.triggers] == [Signal.START]


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_a_plan_that_was_mispredicted_is_left_again_for_the_one_that_was_measured(jitter):
    draw, deciding = random.Random(3), decider(TableOutlook(transition_s=0.2), plan=plan_on(0, 1))
    moves = []
    for step in range(1, 300):
        ruling = deciding.boundary(step, FOUR)
        if ruling.target:
            moves.append(len(ruling.target.devices))
            told(deciding, ruling, seconds=0.2)
        # Four devices are predicted twice as fast as two, and really are slower by half.
        really_s = 2.0 if len(deciding.plan.devices) == 2 else 3.0
        deciding.observe(report(step, really_s * draw.uniform(1 - jitter, 1 + jitter)))
    assert moves == [4, 2]


def test_nothing_is_learned_from_the_seconds_of_steps_in_which_the_critic_learns_alone():
    outlook = TableOutlook()
    deciding = Decider(NereusPolicy(), outlook, plan_on(0, 1, 2, 3), lengths=lengths(), warmup_steps=4)
    rulings = run(deciding, 20, slow=lambda step: 0.3 if step <= 4 else 1.0)
    assert [(r.step, t.signal) for r in rulings for t in r.triggers] == [(8, Signal.START)]
    assert outlook.learned == pytest.approx(1.0)


def test_assumed_lengths_alone_fire_no_memory_trigger():
    outlook = TableOutlook(bytes_per_token=1.0)
    deciding = Decider(NereusPolicy(), outlook, plan_on(0, 1), lengths=lengths(1e6))
    assert deciding.boundary(1, FOUR).triggers == ()


def test_a_job_that_fell_back_to_fewer_units_looks_for_a_better_plan_at_the_next_boundary():
    deciding = decider(TableOutlook(transition_s=0.01))
    run(deciding, 6)
    deciding.fell_back(plan_on(0, 1))
    ruling = deciding.boundary(7, FOUR)
    assert [t.signal for t in ruling.triggers] == [Signal.START]
    assert (ruling.action, ruling.target) == (Action.MOVE, plan_on(0, 1, 2, 3))
    assert ruling.transition.current == plan_on(0, 1)


def test_measured_transitions_correct_later_ones():
    deciding = decider(TableOutlook(transition_s=1.0))
    run(deciding, 4)
    ruling = deciding.boundary(5, SupplyView((0, 1, 2)))
    told(deciding, ruling, seconds=4.0)
    deciding.observe(report(5, 4 / 3))
    again = deciding.boundary(6, SupplyView((0, 1)))
    assert ruling.verdict.numbers.transition_s == 1.0
    assert again.verdict.numbers.transition_s == pytest.approx(2.0)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_an_urgent_move_always_goes_through_where_one_is_feasible(data):
    mode = data.draw(st.sampled_from(["nereus", "paper"]))
    deciding = decider(TableOutlook(transition_s=data.draw(st.floats(0, 1e6))), mode=mode, gamma=data.draw(
        st.floats(0, 2)))  # fmt: skip
    for step in range(1, 25):
        devices = tuple(sorted(data.draw(st.sets(st.integers(0, 5), min_size=1, max_size=6))))
        ruling = deciding.boundary(step, SupplyView(devices))
        if ruling.target:
            told(deciding, ruling, seconds=1.0)
        assert set(deciding.plan.devices) <= set(devices)
        deciding.observe(report(step, 0.04 * 100 / len(deciding.plan.devices)))


def recorded_run(folder, mode, seed):
    """A run over a flapping supply with growing, noisy lengths, written as a real run writes it."""
    draw, deciding = random.Random(seed), decider(TableOutlook(transition_s=0.7), mode=mode)
    writer, shown = RunFolder(folder), None
    writer.open("")
    writer.event(Start(0, config={"mode": mode}, cluster={}, models={}, plan=plan_on(0, 1, 2, 3)))
    rulings, devices, step = [], (0, 1, 2, 3), 1
    while step <= 80:
        if draw.random() < 0.25:
            devices = tuple(sorted(draw.sample(range(6), draw.randint(0, 6))))
        leaving = (Announcement(devices[:1], draw.uniform(0, 30)),) if devices and draw.random() < 0.3 else ()
        view = SupplyView(devices, leaving)
        if view != shown:
            writer.event(supply_event(step, view))
        elif deciding.plan is None:
            continue
        shown = view
        ruling = deciding.boundary(step, view)
        rulings.append(ruling)
        for event in ruling.events:
            writer.event(event)
        if ruling.action is Action.MOVE and draw.random() < 0.3:
            writer.event(TransitionFailed(step, ruling.current, ruling.target, "a peer was late"))
            deciding.aborted(ruling.target, step)
        elif ruling.action is Action.MOVE:
            seconds = draw.uniform(0.1, 3.0)
            done = TransitionReport((), "shadow", 0, 0, seconds, True)
            writer.event(TransitionEnd(step, ruling.current, ruling.target, done, ruling.transition.seconds))
            told(deciding, ruling, seconds=seconds)
        elif ruling.action is Action.RESTART:
            deciding.moved(ruling.target)
        if deciding.plan is None:
            continue
        mean = (100 + 3 * step) * draw.uniform(0.8, 1.2)
        ended = report(step, 0.04 * mean / len(deciding.plan.devices) * draw.uniform(0.7, 1.6), mean)
        writer.event(StepEnd(step, deciding.plan, ended))
        deciding.observe(ended)
        step += 1
    writer.close()
    return rulings


@pytest.mark.parametrize("mode", ["nereus", "paper"])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_comes_to_every_ruling_again_bit_for_bit(tmp_path, mode, seed):
    rulings = recorded_run(tmp_path / "run", mode, seed)
    events = read_events(tmp_path / "run" / "events.jsonl")

    def start(line):
        return decider(TableOutlook(transition_s=0.7), mode=line["config"]["mode"], plan=Plan.from_json(line["plan"]))

    again = list(replay(events, start))
    assert again == rulings
    decided = ruled_decisions(again)
    assert json.loads(json.dumps(decided)) == recorded_decisions(events)
    assert {line["verdict"] for line in decided if line["type"] == "decision"} >= {"decline", "urgent"}


def test_a_replay_of_changed_inputs_decides_otherwise(tmp_path):
    recorded_run(tmp_path / "run", "nereus", 0)
    events = read_events(tmp_path / "run" / "events.jsonl")
    changed = [
        {**line, "lengths": {**line["lengths"], "mean": line["lengths"]["mean"] * 2}} if line["type"] == "step" and
        line["step"] == 30 else line for line in events
    ]  # fmt: skip

    def start(line):
        return decider(TableOutlook(transition_s=0.7), plan=Plan.from_json(line["plan"]))

    assert ruled_decisions(replay(changed, start)) != ruled_decisions(replay(events, start))
