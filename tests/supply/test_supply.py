"""Supplies over written and published traces, notice files and a notice endpoint."""

import http.server
import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError, DataError
from nereus.recipe.sections import SupplyConfig
from nereus.supply.supply import (
    Announcement,
    NoticedSupply,
    StaticSupply,
    SupplyView,
    TraceSupply,
    configured_supply,
    parse_notices,
)
from nereus.supply.traces import draw_devices, read_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def counts(trace):
    return [(change.time_s, len(change.devices)) for change in trace.changes]


def test_a_csv_of_counts_holds_each_count_until_the_next_row(tmp_path):
    trace = read_trace(written(tmp_path, "t.csv", "time_s,devices\n0,4\n30,6\n60.5,3\n90,5\n"))
    supply = TraceSupply(trace)
    assert [len(supply.at(t).devices) for t in (0, 29.9, 30, 60.4, 60.5, 1e6)] == [4, 4, 6, 6, 3, 5]
    assert trace.device_ids == (0, 1, 2, 3, 4, 5)


def test_a_count_before_the_first_row_is_the_first_row_s(tmp_path):
    trace = read_trace(written(tmp_path, "t.csv", "time_s,devices\n10,4\n20,2\n"))
    assert len(TraceSupply(trace).at(0.0).devices) == 4


def test_a_supply_may_drop_to_nothing_and_come_back(tmp_path):
    trace = read_trace(written(tmp_path, "t.csv", "time_s,devices\n0,2\n5,0\n9,1\n"))
    assert [TraceSupply(trace).at(t).devices for t in (0, 5, 9)] == [(0, 1), (), (0,)]


def test_who_leaves_is_drawn_by_seed(tmp_path):
    path = written(tmp_path, "t.csv", "time_s,devices\n0,16\n10,8\n20,16\n")
    drawn = {read_trace(path, seed=seed).changes[1].devices for seed in range(20)}
    assert len(drawn) > 10
    assert read_trace(path, seed=3) == read_trace(path, seed=3)
    assert read_trace(path, seed=3).changes[2].devices == tuple(range(16))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_drawn_devices_follow_the_counts_and_nobody_is_exchanged(wanted, seed):
    drawn = draw_devices(wanted, seed=seed)
    assert [len(devices) for devices in drawn] == wanted
    for before, after in zip(drawn, drawn[1:], strict=False):
        assert set(before) <= set(after) or set(after) <= set(before)
    assert all(d < max(wanted) for devices in drawn for d in devices)


def test_a_tenplex_schedule_holds_each_size_for_its_minutes(tmp_path):
    rows = [{"time": 35, "size": 16}, {"time": 35, "size": 8}, {"time": 13, "size": 4}, {"time": 0, "size": 0}]
    trace = read_trace(written(tmp_path, "t.json", json.dumps(rows)))
    assert counts(trace) == [(0.0, 16), (2100.0, 8), (4200.0, 4)]


def test_a_spot_trace_steps_by_its_gap_and_merges_equal_counts(tmp_path):
    document = {"metadata": {"gap_seconds": 600}, "data": [4, 4, 3, 3, 5]}
    trace = read_trace(written(tmp_path, "t.json", json.dumps(document)))
    assert counts(trace) == [(0.0, 4), (1200.0, 3), (2400.0, 5)]


def test_named_nodes_keep_their_device_over_leaving_and_coming_back(tmp_path):
    text = "0,add,node7\r\n0,add,node2\r\n1000,remove,node7\r\n2500,add,node9\r\n3000,add,node7\r\n"
    trace = read_trace(written(tmp_path, "t.csv", text))
    assert [(c.time_s, c.devices) for c in trace.changes] == [
        (0.0, (0, 1)), (1.0, (1,)), (2.5, (1, 2)), (3.0, (0, 1, 2)),
    ]  # fmt: skip


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not beside this checkout")
def test_published_traces_have_the_sizes_their_publishers_state():
    tenplex = read_trace(TRACES / "tenplex" / "dynamic_resources-tenplex-schedule.json")
    bamboo = read_trace(TRACES / "bamboo" / "p3-trace.csv")
    assert [n for _, n in counts(tenplex)][:5] == [16, 8, 4, 8, 16]
    assert tenplex.changes[-1].time_s + 13 * 60 == 538 * 60
    after_start = [n for time_s, n in counts(bamboo) if time_s >= 600]
    assert (min(after_start), max(after_start)) == (10, 32)
    assert bamboo.changes[-1].time_s == pytest.approx(11.37 * 3600, rel=0.01)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "empty"),
        ("t.csv", "time_s,devices\n", "no rows"),
        (
            "t.csv",
            "time,count\n0,4\n",
            "line 1: .* is no row of a form that is read; read are .csv with a header time_s,devices",
        ),
        ("t.csv", "time_s,devices\n0,4\n5,x\n", "line 3: expected time_s,devices with a whole count"),
        ("t.csv", "time_s,devices\n0,4\n5,-1\n", "line 3"),
        ("t.csv", "time_s,devices\nsoon,4\n", "line 2: .* has no time"),
        ("t.csv", "time_s,devices\n-1,4\n", "line 2: time -1; it must be at least 0"),
        ("t.csv", "time_s,devices\n0,4\n9,2\n\n8,3\n", "line 5: time 8 is before 9"),
        ("t.csv", "0,add,a\n1,remove,b\n", "line 2: removes b, which is not there"),
        ("t.csv", "0,add,a\n1,drop,a\n", "line 2: expected ms,add|remove,node"),
        ("t.json", "[1, 2", "line 1: not JSON"),
        ("t.json", "{}", "not a form that is read; .*gap_seconds"),
        ("t.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', "not a form that is read; .*gap_seconds"),
        ("t.json", '{"metadata": {"gap_seconds": 60}, "data": [1, 2.5]}', r"data\[1\] is 2.5"),
        ("t.json", '[{"time": 5, "size": 4}, {"time": 5}]', "entry 1"),
        ("t.json", '[{"time": 0, "size": 4}]', "no entry lasts"),
        ("t.txt", "0,4", "rows without a header; put time_s,devices above them, or time_ms,devices"),
        ("t.csv", "0,4\n60,2\n", "rows without a header"),
        ("t.txt", '[0, "add"]\n', "line 1: expected"),
        ("t.csv", "2021-13-01, 00:00:00, 4\n", "is no date and time"),
        ("t.yaml", "0,4", ".yaml is not read; read are .csv"),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message) as caught:
        read_trace(written(tmp_path, name, text))
    assert name in str(caught.value)


def test_published_text_forms_are_read(tmp_path):
    dated = "2021-12-11, 11:11:30, 5\n2021-12-11, 11:13:10, 5\n2021-12-12, 00:00:00, 4\n"
    assert counts(read_trace(written(tmp_path, "gcp.txt", dated))) == [(0.0, 5), (46110.0, 4)]
    lines = [
        [0, "add", {"nodes": ["node-0", "node-1", "node-2"]}],
        [60000, "no-op", {"nodes": [], "duration": 60000}],
        [120000, "remove", {"nodes": ["node-1"]}],
        [180000, "migration", {"nodes": ["node-0"]}],
        [240000, "add", {"nodes": ["node-9"]}],
    ]
    parcae = read_trace(written(tmp_path, "aws.txt", "\n".join(map(json.dumps, lines))))
    assert [(c.time_s, c.devices) for c in parcae.changes] == [(0.0, (0, 1, 2)), (120.0, (0, 2)), (240.0, (0, 2, 3))]


@pytest.mark.parametrize("header", ["time_ms,devices", "ms,count"])
def test_a_header_says_the_unit_of_time(tmp_path, header):
    assert counts(read_trace(written(tmp_path, "t.csv", f"{header}\n0,4\n30000,6\n"))) == [(0.0, 4), (30.0, 6)]


def test_clock_times_count_from_the_first_row(tmp_path):
    trace = read_trace(written(tmp_path, "t.csv", "time_s,devices\n1700000000,4\n1700000030,6\n"))
    assert counts(trace) == [(0.0, 4), (30.0, 6)]


def test_a_long_trace_is_read_in_time_that_grows_with_its_rows(tmp_path):
    """60,000 rows took 40 s when every row looked at all of them."""
    rows = "".join(f"{i},{10 + i % 7}\n" for i in range(60_000))
    begun = time.process_time()
    trace = read_trace(written(tmp_path, "t.csv", f"time_s,devices\n{rows}"))
    assert len(trace.changes) == 60_000 and time.process_time() - begun < 10


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not beside this checkout")
def test_every_published_trace_is_read():
    gcp = read_trace(TRACES / "bamboo" / "a100x1-east1b.txt")
    sizes = [len(change.devices) for change in gcp.changes]
    assert (min(sizes), max(sizes)) == (17, 64) and 26 * 3600 < gcp.changes[-1].time_s < 28 * 3600
    for name, least, most in (("trace_hh_55_65.txt", 20, 32), ("trace_ll_10_11.txt", 10, 32)):
        parcae = read_trace(TRACES / "parcae" / name)
        assert parcae.changes[-1].time_s <= 3600
        assert all(least <= len(change.devices) <= most for change in parcae.changes[1:])


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(DataError, match="not found"):
        read_trace(tmp_path / "nowhere.csv")


def test_a_trace_can_announce_who_leaves(tmp_path):
    trace = read_trace(written(tmp_path, "t.csv", "time_s,devices\n0,3\n100,2\n"))
    gone = (set(range(3)) - set(trace.changes[1].devices)).pop()
    supply = TraceSupply(trace, notice_s=30.0)
    assert supply.at(69.0).announced == ()
    assert supply.at(80.0) == SupplyView((0, 1, 2), (Announcement((gone,), 20.0),))
    assert supply.at(100.0) == SupplyView(trace.changes[1].devices)


def test_a_static_supply_changes_when_it_was_told_to():
    supply = StaticSupply([1, 0], later=[(5.0, SupplyView((1,)))])
    assert [supply.at(t).devices for t in (0.0, 4.9, 5.0)] == [(0, 1), (0, 1), (1,)]


def test_a_recipe_names_its_trace_and_notices(tmp_path):
    trace = written(tmp_path, "t.csv", "time_s,devices\n0,2\n5,3\n")
    notices = written(tmp_path, "n.json", '{"device": 0, "deadline_s": 4}')
    supply = configured_supply(SupplyConfig(trace=trace, notices=str(notices)), range(3))
    assert supply.at(1.0) == SupplyView((0, 1), (Announcement((0,), 4.0),))
    assert supply.at(6.0) == SupplyView((1, 2))
    assert configured_supply(SupplyConfig(), range(3)).at(9.0) == SupplyView((0, 1, 2))


def test_a_trace_that_needs_more_devices_than_there_are_is_refused(tmp_path):
    trace = written(tmp_path, "t.csv", "time_s,devices\n0,2\n5,6\n")
    with pytest.raises(ConfigError, match="supply.trace: .* up to 6 devices; the cluster has 4 .*cluster.workers to 6"):
        configured_supply(SupplyConfig(trace=trace), range(4))


def test_a_notice_file_announces_a_device_and_takes_it_away_at_its_deadline(tmp_path):
    path = tmp_path / "notices.json"
    supply = NoticedSupply(StaticSupply(range(3)), path)
    assert supply.at(0.0) == SupplyView((0, 1, 2))
    path.write_text('{"device": 1, "deadline_s": 10}')
    assert supply.at(5.0) == SupplyView((0, 1, 2), (Announcement((1,), 10.0),))
    assert supply.at(12.0) == SupplyView((0, 1, 2), (Announcement((1,), 3.0),))
    assert supply.at(15.0) == SupplyView((0, 2))
    path.write_text("")
    assert supply.at(16.0) == SupplyView((0, 1, 2))


def test_notices_of_one_deadline_are_one_announcement_and_rows_may_be_lines(tmp_path):
    path = tmp_path / "notices.jsonl"
    path.write_text(
        '{"device": 1, "deadline_s": 10}\n\n{"device": 2, "deadline_s": 10}\n{"device": 0, "deadline_s": 5}\n'
    )
    view = NoticedSupply(StaticSupply(range(3)), path).at(0.0)
    assert view.announced == (Announcement((0,), 5.0), Announcement((1, 2), 10.0))
    assert view.deadline_s == 5.0
    assert view.leaving_within(5.0) == {0} and view.leaving_within(10.0) == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "n, line 1: not JSON"),
        ('{"device": 1, "deadline_s": 1}\n{"device": 1', "n, line 2: not JSON"),
        ('[{"device": 1}]', "line 1: write"),
        ('{"device": -1, "deadline_s": 1}', "device is -1"),
        ('{"device": 1, "deadline_s": -1}', "deadline_s is -1"),
        ('{"device": 1, "deadline_s": "soon"}', "deadline_s is 'soon'"),
    ],
)
def test_a_bad_notice_is_refused_with_its_place(text, message):
    with pytest.raises(DataError, match=message):
        parse_notices(text, "n")


def test_a_notice_endpoint_is_asked_at_every_boundary_and_may_fail():
    answers = [(200, b'[{"device": 0, "deadline_s": 60}]'), (500, b""), (404, b"")]

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        supply = NoticedSupply(StaticSupply(range(2)), f"http://127.0.0.1:{server.server_port}/notices")
        assert supply.at(0.0).announced == (Announcement((0,), 60.0),)
        answers.pop(0)
        assert supply.at(20.0).announced == (Announcement((0,), 40.0),)
        assert supply.problem is not None and "500" in supply.problem
        answers.pop(0)
        assert supply.at(30.0) == SupplyView((0, 1)) and supply.problem is None
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert supply.at(40.0) == SupplyView((0, 1)) and supply.problem is not None
