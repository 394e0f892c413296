"""Groups stand without a global world, agree before they send, and end with an error rather than a hang."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support import StoreFactory, run_threads

from nereus.comm.groups import Group, GroupSpec, build_group, connect_store, serve_store
from nereus.errors import GroupError

SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=30)


def test_collectives_give_every_rank_the_same_values() -> None:
    def rank_main(rank: int, store: StoreFactory) -> tuple[list[float], float, list[float], list[int]]:
        group = build_group(store(), "all", rank=rank, size=4, timeout=LONG)
        total, largest = torch.full((3,), float(rank)), torch.tensor([float(rank)])
        group.all_reduce(total)
        group.all_reduce(largest, op="max")
        sent = torch.arange(2) + 10.0 if rank == 2 else torch.zeros(2)
        group.broadcast(sent, source=2)
        gathered = [int(t) for t in group.all_gather(torch.tensor([rank]))]
        group.barrier()
        group.close()
        return total.tolist(), largest.item(), sent.tolist(), gathered

    expected = ([6.0] * 3, 3.0, [10.0, 11.0], [0, 1, 2, 3])
    assert run_threads(4, rank_main) == [expected] * 4


def test_sends_and_receives_in_both_directions_do_not_wait_for_each_other() -> None:
    def rank_main(rank: int, store: StoreFactory) -> bool:
        group = build_group(store(), "pair", rank=rank, size=2, timeout=LONG)
        mine = torch.full((1 << 20,), float(rank), dtype=torch.bfloat16)
        other = torch.empty_like(mine)
        sent = group.send(mine, 1 - rank, tag=rank)
        group.recv(other, 1 - rank, tag=1 - rank)
        sent.wait()
        return bool((other == 1 - rank).all())

    assert run_threads(2, rank_main) == [True, True]


def test_a_group_of_one_needs_no_store_and_changes_nothing() -> None:
    group, tensor = Group.single(), torch.arange(3.0)
    group.all_reduce(tensor)
    group.broadcast(tensor, source=0)
    group.barrier()
    group.agree(7)
    assert group.all_gather(tensor)[0] is tensor and tensor.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(GroupError, match="no such peer"):
        group.send(tensor, 1)


def test_28_ranks_stand_as_threads_of_one_process() -> None:
    def rank_main(rank: int, store: StoreFactory) -> float:
        group = GroupSpec("wide", tuple(range(100, 128))).join(store(), 100 + rank, timeout=LONG)
        value = torch.ones(1)
        group.all_reduce(value)
        return value.item()

    assert run_threads(28, rank_main) == [28.0] * 28


def test_a_group_is_rebuilt_under_a_new_name_with_its_timeout_and_a_new_member() -> None:
    def rank_main(rank: int, store: StoreFactory) -> list[float]:
        client, sums = store(), []
        for epoch in range(20):
            size = 2 + epoch % 2
            if rank >= size:
                continue
            group = build_group(client, f"epoch-{epoch}", rank=rank, size=size, timeout=LONG)
            assert group.timeout == LONG and group.backend == "gloo"
            value = torch.ones(1)
            group.all_reduce(value)
            group.close()
            sums.append(value.item())
        return sums

    assert run_threads(3, rank_main) == [[2.0, 3.0] * 10, [2.0, 3.0] * 10, [3.0] * 10]


def test_ranks_that_disagree_all_learn_it_before_anything_is_sent() -> None:
    def rank_main(rank: int, store: StoreFactory) -> str:
        group = build_group(store(), "agree", rank=rank, size=3, timeout=LONG)
        group.agree(11)
        with pytest.raises(GroupError, match="disagree"):
            group.agree(12 if rank == 1 else 11)
        return "told"

    assert run_threads(3, rank_main) == ["told"] * 3


def test_an_absent_rank_ends_the_build_at_the_timeout() -> None:
    def rank_main(rank: int, store: StoreFactory) -> float:
        client, begun = store(), time.monotonic()
        with pytest.raises(GroupError, match="group lonely"):
            build_group(client, "lonely", rank=rank, size=2, timeout=SHORT)
        return time.monotonic() - begun

    assert run_threads(1, rank_main)[0] < 8


def test_a_silent_peer_ends_a_collective_at_the_timeout_of_the_rebuilt_group() -> None:
    finished = threading.Event()

    def rank_main(rank: int, store: StoreFactory) -> float:
        client = store()
        first = build_group(client, "first", rank=rank, size=2, timeout=SHORT)
        first.barrier()
        first.close()
        group = build_group(client, "second", rank=rank, size=2, timeout=SHORT)
        if rank == 1:
            finished.wait(30)
            return 0.0
        begun = time.monotonic()
        try:
            with pytest.raises(GroupError, match="second, all_reduce"):
                group.all_reduce(torch.ones(4))
            return time.monotonic() - begun
        finally:
            finished.set()

    waited = run_threads(2, rank_main)[0]
    assert 1.0 < waited < 6.0


def _die_in_the_group(host: str, port: int) -> None:
    group = build_group(connect_store(host, port, timeout=LONG), "mortal", rank=1, size=2, timeout=LONG)
    group.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_noticed_long_before_the_timeout() -> None:
    server = serve_store()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_in_the_group, args=(server.host, server.port), daemon=True)
    process.start()
    store = connect_store(server.host, server.port, timeout=LONG)
    group = build_group(store, "mortal", rank=0, size=2, timeout=LONG)
    group.barrier()
    begun = time.monotonic()
    with pytest.raises(GroupError, match="mortal, all_reduce"):
        group.all_reduce(torch.ones(1))
    assert time.monotonic() - begun < 10
    process.join(10)


def test_building_and_closing_groups_leaks_neither_threads_nor_descriptors() -> None:
    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    def rank_main(rank: int, store: StoreFactory) -> None:
        client = store()
        for epoch in range(30):
            group = build_group(client, f"e{epoch}", rank=rank, size=3, timeout=LONG)
            group.all_reduce(torch.ones(8))
            group.close()

    run_threads(3, rank_main)
    before = counts()
    run_threads(3, rank_main)
    after = counts()
    assert after[0] <= before[0] + 4 and after[1] <= before[1] + 6


def test_a_closed_group_refuses_rather_than_doing_nothing() -> None:
    def rank_main(rank: int, store: StoreFactory) -> str:
        group = build_group(store(), "closed", rank=rank, size=2, timeout=LONG)
        group.barrier()
        group.close()
        with pytest.raises(GroupError, match="is closed"):
            group.all_reduce(torch.ones(1))
        return "refused"

    assert run_threads(2, rank_main) == ["refused"] * 2


def test_a_name_serves_again_after_all_ranks_closed_or_failed() -> None:
    def rank_main(rank: int, store: StoreFactory) -> float:
        client = store()
        if rank < 2:
            with pytest.raises(GroupError, match="group again"):
                build_group(client, "again", rank=rank, size=3, timeout=SHORT)
        value = torch.ones(1)
        client.add("failed", 1)
        while client.add("failed", 0) < 3:
            time.sleep(0.01)
        for _ in range(5):
            group = build_group(client, "again", rank=rank, size=3, timeout=LONG)
            group.all_reduce(value)
            group.close()
            client.add("closed", 1)
            while client.add("closed", 0) % 3:
                time.sleep(0.01)
        return value.item()

    assert run_threads(3, rank_main) == [3.0**5] * 3
