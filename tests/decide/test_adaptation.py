"""Adaptation over a virtual clock: what is recorded, and that the record replays."""

import json

import pytest
from table_outlook import TableOutlook, lengths, plan_on, report

from nereus.decide.adaptation import Adaptation
from nereus.decide.decider import Decider
from nereus.decide.policies.nereus import NereusPolicy
from nereus.decide.replay import recorded_decisions, replay, ruled_decisions
from nereus.decide.ruling import Action
from nereus.plan import Plan
from nereus.reports.events import Start, StepEnd, TransitionEnd
from nereus.supply.supply import StaticSupply, SupplyView, TraceSupply
from nereus.supply.traces import trace_of_counts
from nereus.transition.operations import TransitionReport

PLAN = plan_on(0, 1, 2, 3)


def decider():
    return Decider(NereusPolicy(), TableOutlook(transition_s=0.5), PLAN, lengths=lengths())


def drive(supply, num_steps, *, asked=None):
    """A run as the controller drives it, on a clock that steps and transitions advance. Returns its events.

    asked: {step: plan} that a person or the recipe wants before a step.
    """
    events = [Start(0, config={}, cluster={}, models={}, plan=PLAN)]
    adaptation, plan, now_s = Adaptation(supply, decider(), events.append), PLAN, 0.0
    for step in range(1, num_steps + 1):
        if asked and step in asked:
            events.append(TransitionEnd(step, plan, asked[step], TransitionReport((), "shadow", 0, 0, 0.4, True), 0.5))
            plan = asked[step]
            adaptation.moved(plan, seconds=0.4, predicted_s=0.5)
        ruling = adaptation.rule(step, now_s=now_s)
        while adaptation.paused and ruling.target is None:
            now_s += 1.0
            ruling = adaptation.rule(step, now_s=now_s)
        if ruling.action is Action.MOVE:
            done = TransitionReport((), "shadow", 0, 0, 0.75, True)
            events.append(TransitionEnd(step, plan, ruling.target, done, ruling.transition.seconds))
            adaptation.moved(ruling.target, seconds=done.seconds, predicted_s=ruling.transition.seconds)
            now_s += done.seconds
        elif ruling.action is Action.RESTART:
            adaptation.moved(ruling.target)
        plan = ruling.target or plan
        ended = report(step, 4.0 / len(plan.devices))
        events.append(StepEnd(step, plan, ended))
        adaptation.ended(ended)
        now_s += ended.step_s
    return events


def lines(events):
    return [json.loads(json.dumps({"type": e.type, "step": e.step, **e.fields()})) for e in events]


@pytest.mark.parametrize("seed", range(3))
def test_a_flapping_supply_with_a_drop_to_nothing_is_recorded_and_replays(seed):
    counts = [(0.0, 4), (7.0, 6), (12.0, 3), (20.0, 0), (31.0, 2), (40.0, 5)]
    recorded = lines(drive(TraceSupply(trace_of_counts(counts, seed=seed)), 40))
    supplied = [len(line["devices"]) for line in recorded if line["type"] == "supply"]
    assert supplied == [4, 6, 3, 0, 2, 5]
    actions = [line["action"] for line in recorded if line["type"] == "decision"]
    assert actions.count("pause") == 1 and actions.count("restart") == 1 and "move" in actions
    again = ruled_decisions(
        replay(recorded, lambda start: decider() if Plan.from_json(start["plan"]) == PLAN else None)
    )
    assert again == recorded_decisions(recorded)


def test_moves_that_were_asked_for_replay_whether_or_not_something_is_ruled_at_their_step():
    trace = trace_of_counts([(0.0, 4), (9.0, 6)], seed=0)
    asked = {4: plan_on(0, 1), 5: plan_on(2, 3), 8: plan_on(1), 30: plan_on(0, 1, 2)}
    recorded = lines(drive(TraceSupply(trace), 40, asked=asked))
    assert [line["step"] for line in recorded if line["type"] == "transition"] == [4, 4, 5, 8, 8, 30]
    assert ruled_decisions(replay(recorded, lambda start: decider())) == recorded_decisions(recorded)


def test_an_unchanged_supply_is_recorded_once():
    recorded = lines(drive(StaticSupply(range(4)), 10))
    assert [line["step"] for line in recorded if line["type"] == "supply"] == [1]


def test_while_paused_nothing_is_asked_until_the_supply_changes():
    events = []
    supply = StaticSupply(range(4), later=[(1.0, SupplyView(())), (5.0, SupplyView((2,)))])
    adaptation = Adaptation(supply, decider(), events.append)
    adaptation.rule(1, now_s=0.0)
    assert adaptation.rule(2, now_s=1.0).action is Action.PAUSE and adaptation.paused
    recorded = len(events)
    for now_s in (2.0, 3.0, 4.0):
        assert adaptation.rule(2, now_s=now_s).verdict is None
    assert len(events) == recorded
    back = adaptation.rule(2, now_s=5.0)
    assert (back.action, back.target) == (Action.RESTART, plan_on(2))
    adaptation.moved(back.target)
    assert not adaptation.paused
