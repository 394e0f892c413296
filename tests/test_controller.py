"""The controller drives a runtime on a virtual clock: what it calls, in which order, and what it records."""

import json
import time

import pytest
from table_outlook import CLUSTER, TableOutlook, lengths, plan_on, report

from nereus.controller import Adapting, Clock, Controller, Course
from nereus.decide.decider import Decider
from nereus.decide.policies.nereus import NereusPolicy
from nereus.decide.replay import recorded_decisions, replay, ruled_decisions
from nereus.errors import StateLost, TransitionAborted
from nereus.plan import ACTOR_TRAINING, Plan
from nereus.reports.control import Requests, write_whole
from nereus.reports.events import Decision, Start, StepEnd, TransitionEnd, TransitionFailed
from nereus.runtime.scripted import ScriptedRuntime
from nereus.supply.supply import NoticedSupply, StaticSupply, SupplyView, TraceSupply
from nereus.supply.traces import trace_of_counts
from nereus.transition.remains import PlanBroken, Remains

PLAN = plan_on(0, 1, 2, 3)


class VirtualTime:
    """Time that passes only where it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def pass_by(self, seconds):
        self.now_s += seconds

    @property
    def clock(self):
        return Clock(lambda: self.now_s, self.pass_by)


def table_runtime(time, failures=(), transition_s=0.75, of=ScriptedRuntime):
    """A job whose step takes 4 s over its devices. failures: of its first transitions."""
    return of(
        PLAN,
        CLUSTER,
        lambda step, plan: report(step, 4.0 / len(plan.devices)),
        pass_by=time.pass_by,
        transition_s=transition_s,
        resume_s=2.0,
        failures=failures,
    )


def controlled(
    folder,
    counts,
    num_steps,
    *,
    transitions=None,
    infeasible=frozenset(),
    seed=0,
    aborts=0,
    failures=(),
    supply=None,
    outlook=None,
    transition_s=0.75,
):
    """(what the runtime was asked, events) of a run under a trace of counts, or under a given supply."""
    time, events = VirtualTime(), [Start(0, config={}, cluster={}, models={}, plan=PLAN)]
    late = TransitionAborted("1 extend actor-training", "a peer was late")
    runtime = table_runtime(time, failures or [late] * aborts, transition_s)
    adapting, outlook = None, outlook or TableOutlook(transition_s=0.5, infeasible=infeasible)
    if counts or supply:
        decider = Decider(NereusPolicy(), outlook, PLAN, lengths=lengths())
        adapting = Adapting(supply or TraceSupply(trace_of_counts(counts, seed=seed)), decider)
    Controller(
        runtime, outlook, Course(num_steps, 0, transitions or {}), events.append,
        progress=lambda what, step, steps: None, requests=Requests(folder), clock=time.clock, adapting=adapting,
    ).run()  # fmt: skip
    return runtime.asked, events


def test_without_adaptation_only_the_recipe_changes_the_plan(tmp_path):
    target = plan_on(0, 1)
    asked, events = controlled(tmp_path, [], 4, transitions={3: lambda current: target})
    assert asked == [("step", 1, 4), ("step", 2, 4), ("transition", target), ("step", 3, 2), ("step", 4, 2)]
    assert [e.step for e in events if isinstance(e, TransitionEnd)] == [3]
    assert not [e for e in events if isinstance(e, Decision)]


def test_a_lost_device_is_left_before_the_next_step_and_a_recipe_may_still_ask(tmp_path):
    asked, _ = controlled(tmp_path, [(0.0, 4), (2.5, 3)], 6)
    steps = [row for row in asked if row[0] == "step"]
    assert [row[2] for row in steps] == [4, 4, 4, 3, 3, 3]
    assert sum(row[0] == "transition" for row in asked) == 1


def test_a_supply_that_drops_to_nothing_suspends_the_job_and_its_return_resumes_it(tmp_path):
    asked, events = controlled(tmp_path, [(0.0, 4), (5.0, 0), (30.0, 2)], 8)
    kinds = [row[0] for row in asked if row[0] != "step"]
    assert kinds == ["suspend", "resume"]
    assert asked.index(("suspend", 5)) + 1 == next(i for i, row in enumerate(asked) if row[0] == "resume")
    assert [row[1] for row in asked if row[0] == "step"] == list(range(1, 9)), "no step is lost or repeated"
    restarted = [e for e in events if isinstance(e, TransitionEnd)]
    assert [e.report.mode for e in restarted] == ["restart"]


def test_a_move_that_cannot_be_made_live_goes_through_saved_state(tmp_path):
    gone = {plan_on(*devices) for devices in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3))}
    asked, _ = controlled(tmp_path, [(0.0, 4), (2.5, 3)], 6, infeasible=frozenset(gone))
    assert [row[0] for row in asked if row[0] != "step"] == ["suspend", "resume"]


@pytest.mark.parametrize(("seed", "aborts"), [(0, 0), (1, 0), (2, 0), (0, 3)])
def test_a_flapping_run_replays_from_its_events_and_shows_predictions(tmp_path, seed, aborts):
    counts = [(0.0, 4), (6.0, 6), (9.0, 2), (14.0, 5), (20.0, 0), (31.0, 3), (33.0, 6)]
    _, events = controlled(tmp_path, counts, 60, seed=seed, aborts=aborts)
    lines = [json.loads(json.dumps({"type": e.type, "step": e.step, **e.fields()})) for e in events]

    def decider(start):
        outlook = TableOutlook(transition_s=0.5)
        return Decider(NereusPolicy(), outlook, Plan.from_json(start["plan"]), lengths=lengths())

    assert ruled_decisions(replay(lines, decider)) == recorded_decisions(lines)
    steps = [e for e in events if isinstance(e, StepEnd)]
    assert len(steps) == 60
    assert sum(isinstance(e, TransitionFailed) for e in events) == aborts
    predicted = [e for e in steps if e.predicted_step_s is not None]
    assert len(steps) - len(predicted) == aborts, "a step after an aborted move is on the plan that stayed"
    assert all(e.predicted_step_s == pytest.approx(e.report.step_s) for e in predicted)
    verdicts = {e.verdict for e in events if isinstance(e, Decision)}
    assert verdicts == {"admit", "decline", "urgent"}


def recorded(events):
    return [json.loads(json.dumps({"type": e.type, "step": e.step, **e.fields()})) for e in events]


def replayed(lines):
    """The decisions of the same run, decided again."""

    def decider(start):
        plan = Plan.from_json(start["plan"])
        return Decider(NereusPolicy(), TableOutlook(transition_s=0.5), plan, lengths=lengths())

    return ruled_decisions(replay(lines, decider))


@pytest.mark.parametrize("seed", range(3))
def test_a_flapping_supply_with_a_drop_to_nothing_is_recorded_and_replays(tmp_path, seed):
    counts = [(0.0, 4), (7.0, 6), (12.0, 3), (20.0, 0), (31.0, 2), (40.0, 5)]
    lines = recorded(controlled(tmp_path, counts, 40, seed=seed)[1])
    supplied = [len(line["devices"]) for line in lines if line["type"] == "supply"]
    assert supplied == [4, 6, 3, 0, 2, 5]
    actions = [line["action"] for line in lines if line["type"] == "decision"]
    assert actions.count("pause") == 1 and actions.count("restart") == 1 and "move" in actions
    assert replayed(lines) == recorded_decisions(lines)


def test_moves_that_were_asked_for_replay_whether_or_not_something_is_ruled_at_their_step(tmp_path):
    wanted = {4: plan_on(0, 1), 5: plan_on(2, 3), 8: plan_on(1), 30: plan_on(0, 1, 2)}
    transitions = {step: lambda current, plan=plan: plan for step, plan in wanted.items()}
    lines = recorded(controlled(tmp_path, [(0.0, 4), (9.5, 6)], 40, transitions=transitions, transition_s=0.4)[1])
    assert [line["step"] for line in lines if line["type"] == "transition"] == [4, 4, 5, 8, 8, 30]
    assert replayed(lines) == recorded_decisions(lines)


def test_an_unchanged_supply_is_recorded_once(tmp_path):
    _, events = controlled(tmp_path, [], 10, supply=StaticSupply(range(4)))
    assert [line["step"] for line in recorded(events) if line["type"] == "supply"] == [1]


def test_while_paused_nothing_is_asked_until_the_supply_changes(tmp_path):
    looked = []

    class Watched(StaticSupply):
        def at(self, time_s):
            looked.append((time_s, super().at(time_s).devices))
            return super().at(time_s)

    supply = Watched(range(4), later=[(1.0, SupplyView(())), (5.0, SupplyView((2,)))])
    asked, events = controlled(tmp_path, [], 3, supply=supply)
    assert sum(devices == () for _, devices in looked) >= 4, "it looks again and again"
    at_step = [(e.type, getattr(e, "action", None)) for e in events if e.step == 2]
    assert at_step[:2] == [("supply", None), ("trigger", None)]
    decisions = [e for e in events if isinstance(e, Decision) and e.step == 2]
    assert [(e.action, e.target) for e in decisions] == [("pause", None), ("restart", plan_on(2))]
    assert [e.type for e in events if e.step == 2].count("supply") == 2
    assert asked[1:4] == [("suspend", 1), ("resume", plan_on(2)), ("step", 2, 1)]


def test_what_learning_takes_counts_as_deciding_of_the_step_it_learns_from(tmp_path):
    class Slow(TableOutlook):
        def learn(self, plan, report):
            super().learn(plan, report)
            time.sleep(0.02 if report.step == 2 else 0.0)

    _, events = controlled(tmp_path, [(0.0, 4)], 3, outlook=Slow())
    spent = [e.decision_s for e in events if isinstance(e, StepEnd)]
    assert spent[1] >= 0.02 > max(spent[0], spent[2])
    assert all(e.row["timing_s/decision"] == e.decision_s for e in events if isinstance(e, StepEnd))


def test_an_aborted_urgent_move_is_told_and_tried_again_at_the_next_boundary(tmp_path):
    asked, events = controlled(tmp_path, [(0.0, 4), (2.5, 3)], 6, aborts=1)
    assert [row[0] for row in asked] == ["step"] * 3 + ["aborted", "step", "transition", "step", "step"]
    target = next(row[1] for row in asked if row[0] == "aborted")
    assert [(e.step, e.plan, e.target) for e in events if isinstance(e, TransitionFailed)] == [(4, PLAN, target)]


def test_a_device_with_a_notice_is_left_so_early_that_moving_ends_before_its_deadline(tmp_path):
    """Steps of 1 s and a move of 6 s, as predicted: one that began before the last step would end at 25 s."""
    notices = tmp_path / "notices.json"
    notices.write_text('{"device": 3, "deadline_s": 20}')
    time, events = VirtualTime(), []
    runtime = table_runtime(time, transition_s=6.0)
    outlook = TableOutlook(transition_s=6.0)
    decider = Decider(NereusPolicy(), outlook, PLAN, lengths=lengths())
    ended_s = {}

    def observe(event):
        events.append(event)
        if isinstance(event, TransitionEnd):
            ended_s[event.step] = time.now_s

    Controller(
        runtime, outlook, Course(20, 0, {}), observe, progress=lambda what, step, steps: None,
        requests=Requests(tmp_path), clock=time.clock,
        adapting=Adapting(NoticedSupply(StaticSupply(range(4)), notices), decider),
    ).run()  # fmt: skip
    assert list(ended_s.values()) == [13.0], "seven steps, then the move"
    assert [e.verdict for e in events if isinstance(e, Decision) and e.action == "move"] == ["urgent"]


def test_what_was_judged_is_what_is_executed_whoever_wanted_it(tmp_path):
    """Not a transition to the same plan, but the very value, with its prediction in the log."""
    judged = []

    class Judging(TableOutlook):
        def assess(self, current, target):
            judged.append(super().assess(current, target))
            return judged[-1]

    executed = []

    class Executing(ScriptedRuntime):
        def transition(self, transition):
            executed.append(transition)
            return super().transition(transition)

    time, events, outlook = VirtualTime(), [], Judging(transition_s=0.5)
    decider = Decider(NereusPolicy(), outlook, PLAN, lengths=lengths())
    supply = TraceSupply(trace_of_counts([(0.0, 4), (2.5, 3)], seed=0))
    Controller(
        table_runtime(time, of=Executing), outlook, Course(6, 0, {2: lambda current: plan_on(0, 1)}), events.append,
        progress=lambda what, step, steps: None, requests=Requests(tmp_path), clock=time.clock,
        adapting=Adapting(supply, decider),
    ).run()  # fmt: skip
    assert len(executed) >= 2 and all(any(one is other for other in judged) for one in executed)
    moves = [e for e in events if isinstance(e, TransitionEnd)]
    assert [e.predicted_s for e in moves] == [transition.seconds for transition in executed]


def test_people_can_reshape_and_stop_a_run_between_two_steps(tmp_path):
    write_whole(tmp_path / "control" / "reshape-1.json", '{"actor-training": "d2@0-1", "actor-generation": "d2@0-1"}')
    asked, _ = controlled(tmp_path, [], 2)
    assert asked == [("transition", plan_on(0, 1)), ("step", 1, 2), ("step", 2, 2)]
    write_whole(tmp_path / "control" / "stop", "")
    assert controlled(tmp_path, [], 5)[0] == []


def broken(whole, *, lost=()):
    """A transition after which only these units of the actor are left of the plan in force."""
    left = ((ACTOR_TRAINING, plan_on(*whole)[ACTOR_TRAINING]),) if whole else ()
    return PlanBroken("seat epoch 1", "worker 3 died", Remains(PLAN, left, frozenset(lost), ("worker 3 died",)))


def test_a_move_that_breaks_the_plan_is_followed_by_the_units_that_are_whole_and_then_by_what_is_best(tmp_path):
    failures = [broken((0, 1), lost=(3,)), None]
    wanted, left = {6: lambda current: plan_on(0, 1, 2)}, plan_on(0, 1)
    asked, events = controlled(tmp_path, [(0.0, 4)], 8, transitions=wanted, failures=failures)
    at = asked.index(("aborted", plan_on(0, 1, 2)))
    found = ("fall back", left, frozenset({3})), ("transition", PLAN), ("step", 6, 4)
    assert tuple(asked[at + 1 : at + 4]) == found
    back = next(e for e in events if isinstance(e, TransitionEnd))
    assert (back.report.mode, back.before, back.after) == ("fall_back", PLAN, left)
    lines = [json.loads(json.dumps({"type": e.type, "step": e.step, **e.fields()})) for e in events]

    def decider(start):
        return Decider(NereusPolicy(), TableOutlook(transition_s=0.5), PLAN, lengths=lengths())

    assert ruled_decisions(replay(lines, decider)) == recorded_decisions(lines)


def test_what_is_lost_altogether_comes_from_saved_state_and_the_steps_since_are_done_again(tmp_path):
    wanted = {step: lambda current: plan_on(0, 1) for step in (3, 5)}
    time, events, outlook = VirtualTime(), [], TableOutlook()
    runtime = table_runtime(time, [broken(())])
    runtime.suspend(0)
    runtime.resume(PLAN)
    Controller(
        runtime, outlook, Course(4, 0, wanted), events.append, progress=lambda what, step, steps: None,
        requests=Requests(tmp_path), clock=time.clock,
    ).run()  # fmt: skip
    assert [row[1] for row in runtime.asked if row[0] == "step"] == [1, 2, 1, 2, 3, 4]
    assert [e.report.mode for e in events if isinstance(e, TransitionEnd)] == ["restart", "shadow"]


def test_what_is_lost_altogether_and_was_never_saved_ends_the_run_by_name(tmp_path):
    with pytest.raises(StateLost, match="before step 2 no whole copy of actor-generation, actor-training is left"):
        controlled(tmp_path, [], 4, transitions={2: lambda current: plan_on(0, 1)}, failures=[broken(())])
