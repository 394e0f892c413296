"""The store answers or refuses within a deadline, whatever thread asks."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from nereus.comm.store import connect_store, serve_store
from nereus.errors import GroupError

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


def test_a_value_set_by_one_client_is_read_by_another() -> None:
    server = serve_store()
    one, other = (connect_store(server.host, server.port, timeout=LONG) for _ in range(2))
    one.set("key", b"\x00value")
    assert other.get("key") == b"\x00value"
    assert other.check(["key"]) and not other.check(["key", "absent"])
    assert [one.add("count", 3), other.add("count", -1)] == [3, 2]
    assert other.compare_set("key", b"\x00value", "new") == b"new" and one.compare_set("key", "old", "x") == b"new"
    assert one.num_keys() == 2 and one.delete_key("key") and not one.delete_key("key")


def test_a_reader_waits_for_the_writer() -> None:
    server = serve_store()
    store = connect_store(server.host, server.port, timeout=LONG)
    threading.Timer(0.2, store.set, ("late", b"here")).start()
    assert store.get("late") == b"here"


def test_threads_may_share_a_client_while_one_waits() -> None:
    server = serve_store()
    store = connect_store(server.host, server.port, timeout=LONG)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda i=i: found.append(store.get(f"key{i}"))) for i in range(16)]
    for thread in threads:
        thread.start()
    for i in range(16):
        store.set(f"key{i}", str(i))
    for thread in threads:
        thread.join(10)
    assert sorted(found) == sorted(str(i).encode() for i in range(16))


def test_a_key_that_never_comes_is_refused_at_the_deadline() -> None:
    server = serve_store()
    store = connect_store(server.host, server.port, timeout=SHORT)
    begun = time.monotonic()
    with pytest.raises(GroupError, match=r"get never: not there within 0\.3 s"):
        store.get("never")
    with pytest.raises(GroupError, match=r"not there within 0\.1 s"):
        store.wait(["never"], timedelta(seconds=0.1))
    assert time.monotonic() - begun < 2
    store.set("still", "usable")


def test_a_closed_server_ends_waiting_calls_and_leaves_no_thread() -> None:
    before = threading.active_count()
    server = serve_store()
    store = connect_store(server.host, server.port, timeout=LONG)
    threading.Timer(0.2, server.handle.close).start()
    with pytest.raises(GroupError, match="closed the connection"):
        store.get("never")
    with pytest.raises(GroupError, match="no connection"):
        store.get("never")
    patience = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < patience:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_servers_and_clients_leave_no_descriptor() -> None:
    def cycle() -> None:
        server = serve_store()
        for _ in range(8):
            connect_store(server.host, server.port, timeout=LONG).set("a", "b")
        server.handle.close()

    cycle()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        cycle()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
