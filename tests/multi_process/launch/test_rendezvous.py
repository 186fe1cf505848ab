"""The ranks find each other, or say within seconds who is missing."""

import json
import os
import time

import pytest
import torch.distributed as dist

from lightning_dp.errors import LaunchError
from lightning_dp.launch.rendezvous import describe_this_rank, rendezvous
from lightning_dp.launch.stores import open_store
from tests.support.programs import free_port
from tests.support.trainers import ranks


def leave_together(store, rank, world_size):
    """Nobody ends before all have looked; rank 0, which hosts the store, ends last."""
    for name in ("looked", "left"):
        store.add(name, 1)
        while (name == "looked" or rank == 0) and store.add(name, 0) < world_size:
            time.sleep(0.01)


def _meet(rank, world_size, port, stale):
    store = open_store("127.0.0.1", port, hosts=rank == 0, timeout_s=20, rank=rank)
    if rank == 0:
        for key, value in stale.items():
            store.set(key, value)
    time.sleep(0.3 * rank)
    first = rendezvous(store, rank, world_size, describe_this_rank(), timeout_s=20)
    first.store.set(f"x/{rank}", str(rank))
    second = rendezvous(store, rank, world_size, describe_this_rank(), timeout_s=20)
    seen = [first.store.get(f"x/{r}").decode() for r in range(world_size)]
    fresh = not second.store.check(["x/0"])
    alive = [p.is_alive() and p.is_local() for p in second.processes]
    leave_together(second.store, rank, world_size)
    return seen, fresh, alive, [p.pid for p in second.processes][rank] == os.getpid()


@pytest.mark.multi_process
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_meet_and_each_meeting_has_its_own_keys(world_size):
    for result in ranks(_meet, world_size, {}):
        assert result == ([str(r) for r in range(world_size)], True, [True] * world_size, True)


@pytest.mark.multi_process
def test_keys_left_by_an_earlier_attempt_are_not_believed():
    dead = {"pid": 1, "started": 1, "machine": "m"}
    stale = {
        "hello/1": json.dumps({"nonce": "old", "process": dead, "info": {}}),
        "seat/1": "oldmeeting old",
        "oldmeeting/here/1": "1",
        "oldmeeting/go": "[]",
    }
    for result in ranks(_meet, 2, stale):
        assert result[2] == [True, True]


def _rank_2_never_comes(rank, world_size, port):
    if rank == 2:
        time.sleep(4)
        return None
    store = open_store("127.0.0.1", port, hosts=rank == 0, timeout_s=2, rank=rank)
    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        rendezvous(store, rank, world_size, describe_this_rank(), timeout_s=2)
    time.sleep(1 if rank == 0 else 0)
    return time.monotonic() - begin, str(caught.value)


@pytest.mark.multi_process
def test_missing_ranks_are_named_on_every_rank_that_came():
    results = ranks(_rank_2_never_comes, 3)
    for rank, (seconds, message) in enumerate(results[:2]):
        assert seconds < 6
        assert "Missing: 2." in message
        assert f"rank {rank}/3" in message


def test_a_missing_rank_0_is_named():
    with pytest.raises(LaunchError, match="rank 0 is missing"):
        open_store("127.0.0.1", free_port(), hosts=False, timeout_s=0.5, rank=1)


def test_a_port_that_is_taken_is_named():
    holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(LaunchError, match=str(holder.port)):
        open_store("127.0.0.1", holder.port, hosts=True, timeout_s=1, rank=0)
