"""People ask a running job where it is, to move and to stop; what cannot be is refused before the job is asked."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Ended, Run, nereus, survivors, tiny

from nereus.errors import InputError, PlanError
from nereus.plan import ACTOR_TRAINING, Plan
from nereus.reports.control import Requests, Status, ask_reshape, ask_stop, parse_stages, running, target_plan

PLAN = Plan.parse({"actor-training": "d1t2p1@0-1", "actor-generation": "d2t1p1@0-1"})


def status(phase: str = "training", process: int | None = None, plan: Plan | None = PLAN) -> Status:
    return Status(process or os.getpid(), phase, 3, 20, plan, time.time())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for ask in (Status.read, running, ask_stop):
        with pytest.raises(InputError, match=r"no run here .*status\.json"):
            ask(tmp_path)


def test_a_status_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for written in (status(), status("starting", plan=None)):
        written.write(tmp_path)
        assert Status.read(tmp_path) == written
        assert running(tmp_path) == written


@pytest.mark.parametrize(("phase", "process"), [("done", None), ("failed", None), ("training", 2**22 + 1)])
def test_a_run_that_has_ended_takes_no_requests(tmp_path: Path, phase: str, process: int | None) -> None:
    status(phase, process).write(tmp_path)
    with pytest.raises(InputError, match=f"the run has ended \\({phase} after step 3 of 20\\)"):
        ask_stop(tmp_path)
    assert not Requests(tmp_path).stop_wanted()


def test_changes_are_handed_out_once_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    requests, plan = Requests(tmp_path), PLAN
    ask_reshape(tmp_path, {"actor-training": "d2t1p1@0-1"})
    ask_reshape(tmp_path, {"actor-training": "d1t1p2@0-1"})
    for change in requests.reshapes():
        plan = change(plan)
    assert str(plan[ACTOR_TRAINING]) == "d1t1p2@0-1" and requests.reshapes() == []


REQUEST = st.dictionaries(
    st.sampled_from(["actor-training", "actor-generation", "critic"]) | st.text(max_size=4),
    st.sampled_from(["d1t1p1@0", "d1t2p1@0-1", "d2/mb=0", "d9", "", "d1@0-"]) | st.text(max_size=6),
    max_size=2,
).map(json.dumps)


@settings(deadline=None, max_examples=200)
@given(written=st.binary(max_size=40) | REQUEST.map(str.encode) | st.just(b'{"actor-training": "d1t1'))
def test_no_request_can_end_a_run(written: bytes) -> None:
    """Half a file, a list, binary: it is handed out once as a change that says what is wrong, and set aside."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "control" / "reshape-1.json"
        path.parent.mkdir()
        path.write_bytes(written)
        requests = Requests(Path(name))
        (change,) = requests.reshapes()
        assert requests.reshapes() == []
        try:
            assert isinstance(change(PLAN), Plan)
        except PlanError as error:
            assert "\n" not in str(error)


def test_a_request_that_is_none_is_set_aside_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "reshape-1.json").write_text('["actor-training"]')
    (change,) = Requests(tmp_path).reshapes()
    with pytest.raises(PlanError, match=r"reshape-1.json: expected .*set aside"):
        change(PLAN)
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["reshape-1.refused"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"phase": 3}', '{"plan": [1]}'])
def test_a_status_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(InputError, match="not a status"):
        Status.read(tmp_path)


def test_what_an_earlier_run_in_the_folder_was_asked_is_forgotten(tmp_path: Path) -> None:
    status().write(tmp_path)
    ask_stop(tmp_path)
    ask_reshape(tmp_path, {"actor-training": "d1@0"})
    requests = Requests(tmp_path)
    assert requests.stop_wanted()
    requests.clear()
    assert not requests.stop_wanted() and requests.reshapes() == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "at least one model-stage"), (["actor-training"], "MODEL-STAGE=PLAN"), (["d2t1p1@0-1"], "MODEL-STAGE=PLAN")],
)
def test_a_change_that_names_no_stage_or_no_plan_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_stages(texts)


def test_a_run_without_workers_has_no_plan_to_change() -> None:
    with pytest.raises(InputError, match="no plan yet"):
        target_plan(status("starting", plan=None), {"actor-training": "d1@0"})


def events(run: Path, kind: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]


def wait_until(found: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def asked(folder: Path, *arguments: str, code: int = 0) -> Ended:
    ended = nereus(*arguments, folder=folder)
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output
    return ended


@pytest.mark.timeout(400)
def test_a_running_job_tells_where_it_is_moves_when_asked_and_stops(tmp_path: Path) -> None:
    folder, people = tmp_path / "run", tmp_path / "people"
    people.mkdir()
    arguments = tiny(tmp_path, "trainer.steps=5000", "trainer.critic_warmup=0", recipe="quickstart")
    run = Run(["train", *arguments], log=tmp_path / "output.txt")
    try:
        run.wait_for("step 2:", timeout_s=170)
        tree = run.tree
        told = asked(people, "status", str(folder)).output
        assert told.startswith("training, step ") and "of 5000" in told
        assert "actor-training: d1t2p1@0-1" in told and "critic-training: d1t1p2@2-3" in told

        planned = asked(people, "reshape", str(folder), "actor-training=d1t1p2@2-3", "--dry-run").output
        assert "predicted to take" in planned
        moved = re.search(r"actor-training: d1t2p1@0-1(\S*) -> d1t1p2@2-3(\S*)\n", planned)
        assert moved and moved[1] == moved[2] == "/mb=32/recompute=none", "settings not named stay as they are"
        for change, message in (("actor-training=d1t3p1@0-2", "heads"), ("actor-training=d1t1p1@9", "does not exist")):
            assert message in asked(people, "reshape", str(folder), change, code=2).output
        assert not events(folder, "transition"), "neither a dry run nor a refusal moves anything"

        asked(people, "reshape", str(folder), "actor-training=d1t1p2@2-3")
        wait_until(lambda: events(folder, "transition"))
        moved = events(folder, "transition")[0]
        assert moved["verified"] and moved["mode"] == "shadow"
        wait_until(lambda: "actor-training: d1t1p2@2-3" in asked(people, "status", str(folder)).output)

        asked(people, "stop", str(folder))
        ended = run.wait()
        assert ended.code == 0 and ended.seconds < 60, ended.output
        assert asked(people, "status", str(folder)).output.startswith("stopped, step ")
        assert "the run has ended" in asked(people, "stop", str(folder), code=2).output
        assert not survivors(tree)
    finally:
        run.end()
