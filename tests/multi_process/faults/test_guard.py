"""The first failure of any rank becomes an error on every rank, by name, within seconds."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_dp.errors import RankFailedError
from lightning_dp.faults.failure_guard import FailureGuard
from lightning_dp.faults.store import with_prefix
from lightning_dp.faults.waits import EngineWait
from lightning_dp.launch.rendezvous import describe_this_rank, rendezvous
from lightning_dp.launch.stores import open_store
from tests.support.logs import log_lines
from tests.support.ranks import LIMIT_S, RankError
from tests.support.trainers import ranks

pytestmark = pytest.mark.multi_process


def guarded(rank, world_size, port, body, **options):
    """Meet, open a guard and a gloo group, run ``body(guard, rank)`` inside; tell how it ended."""
    guard = FailureGuard(**{"error_grace_s": 1.0, **options})
    store = open_store("127.0.0.1", port, hosts=rank == 0, timeout_s=20, rank=rank)
    met = rendezvous(store, rank, world_size, describe_this_rank(), timeout_s=20)
    told = {"finally": False}
    try:
        with guard.guarding():
            thread_store = with_prefix("guard", met.store.clone())
            own = with_prefix("guard", met.store)
            guard.open(own, rank, met.processes, thread_store=thread_store, store_host=0)
            guard.sockets.spared_port = port
            with guard.sockets.recording():
                dist.init_process_group(
                    "gloo",
                    store=with_prefix("pg", met.store),
                    rank=rank,
                    world_size=world_size,
                )
            begin = time.monotonic()
            try:
                body(guard, rank)
            finally:
                told["finally"] = True
    except BaseException as error:
        told.update(error=error, seconds=time.monotonic() - begin)
    linger(met.store, rank, world_size)
    told["rest"] = [t.name for t in threading.enumerate() if t.name == "lean-ddp-watchdog"]
    return told


def linger(store, rank, world_size):
    """Rank 0 hosts the store: it waits for the ranks that still live."""
    try:
        store.add("end", 1)
        deadline = time.monotonic() + (3 if rank == 0 else 0)
        while store.add("end", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.02)
    except dist.DistError:
        pass


def collective(guard, rank):
    dist.all_reduce(torch.ones(2))


def sleep(guard, rank):
    time.sleep(30)


def _fails(rank, world_size, port, failing, how, others):
    def body(guard, rank):
        if rank != failing:
            others(guard, rank)
            return
        time.sleep(0.5)
        if how == "raise":
            raise ValueError("boom in user code")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    return guarded(rank, world_size, port, body)


@pytest.mark.parametrize("others", [sleep, collective], ids=["sleeping", "in a collective"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_reaches_the_other_ranks_with_its_traceback(failing, others):
    results = ranks(_fails, 3, failing, "raise", others)
    for rank, told in enumerate(results):
        error = told["error"]
        assert told["finally"]
        assert told["seconds"] < LIMIT_S
        assert told["rest"] == []
        if rank == failing:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, RankFailedError)
            assert error.rank == failing
            assert "boom in user code" in error.remote_traceback
            assert f"rank {failing} " in str(error)


def _survivors(rank, world_size, port, failing, how, others, path):
    told = _fails(rank, world_size, port, failing, how, others)
    (path / str(rank)).write_text(f"{type(told['error']).__name__} {told['error'].rank}")
    return told


@pytest.mark.parametrize(
    ("failing", "others", "how"),
    [(0, sleep, "kill"), (1, sleep, "exit"), (0, collective, "exit"), (1, collective, "kill")],
)
def test_a_silent_death_is_noticed_and_named(failing, others, how, tmp_path):
    begin = time.monotonic()
    with pytest.raises(RankError):
        ranks(
            _survivors,
            3,
            failing,
            how,
            others,
            tmp_path,
            grace_s=10,
        )
    assert time.monotonic() - begin < 12
    for rank in {0, 1, 2} - {failing}:
        assert (tmp_path / str(rank)).read_text() == f"RankFailedError {failing}"


def _own_error_elsewhere(rank, world_size, port):
    def body(guard, rank):
        if rank == 1:
            raise ValueError("first")
        time.sleep(1.5)

    def slow(guard, rank):
        try:
            body(guard, rank)
        except RankFailedError as error:
            raise KeyError("mine") from error

    return guarded(rank, world_size, port, slow)


def test_a_rank_that_raises_its_own_error_keeps_it_if_it_is_not_a_consequence():
    def body_of(rank, world_size, port):
        def body(guard, rank):
            if rank == 1:
                raise ValueError("first")
            guard._interrupter.disarm()  # as if the interrupt came too late
            time.sleep(1.5)
            raise KeyError("mine")

        return guarded(rank, world_size, port, body)

    told = ranks(body_of, 2)[0]
    assert isinstance(told["error"], KeyError)
    assert "rank 1 " in told["error"].__notes__[0]
    assert "ValueError: first" in told["error"].__notes__[0]


def test_the_error_is_a_consequence_when_raised_from_one():
    told = ranks(_own_error_elsewhere, 2)[0]
    assert isinstance(told["error"], RankFailedError)
    assert told["error"].rank == 1


def _barriers(rank, world_size, port):
    def body(guard, rank):
        guard.barrier("same", dist.barrier)
        if rank == 0:
            guard.barrier("Trainer.save_checkpoint", dist.barrier)
        guard.barrier("user", dist.barrier)

    return guarded(rank, world_size, port, body)


def test_ranks_at_barriers_of_different_names_are_told_so():
    for told in ranks(_barriers, 2):
        assert isinstance(told["error"], RankFailedError)
        assert "save_checkpoint" in str(told["error"])
        assert "every rank" in str(told["error"])
        assert told["seconds"] < LIMIT_S


def _deadlock(rank, world_size, port):
    def body(guard, rank):
        guard.barrier("start", dist.barrier)
        guard.waits._engine = lambda: EngineWait(
            3 + rank, "the gradients of step 3" if rank else ""
        )
        if rank == 0:
            guard.barrier("", dist.barrier)
            return
        time.sleep(30)

    return guarded(rank, world_size, port, body)


def test_ranks_that_wait_for_each_other_are_told_so():
    for told in ranks(_deadlock, 2, grace_s=10):
        assert isinstance(told["error"], RankFailedError)
        assert "rank 0 waits for a barrier" in str(told["error"])
        assert "rank 1 waits for the gradients of step 3" in str(told["error"])
        assert told["seconds"] < LIMIT_S


def _one_computes(rank, world_size, port):
    def body(guard, rank):
        if rank == 1:
            time.sleep(5)  # busy, not waiting: no deadlock
        guard.barrier("late", dist.barrier)

    return guarded(rank, world_size, port, body)


def test_a_slow_rank_is_no_deadlock():
    for told in ranks(_one_computes, 2):
        assert "error" not in told


def _stall(rank, world_size, port):
    records = log_lines()

    def body(guard, rank):
        if rank == 1:
            time.sleep(4)
        guard.waits._engine = lambda: EngineWait(1, "bucket 0 of 1", ("layer.weight",))
        dist.barrier()

    told = guarded(rank, world_size, port, body, stall_report_s=2.0)
    return told, records


def test_a_stall_is_reported_with_what_and_who():
    (told, records), (_, other) = ranks(_stall, 2)
    assert "error" not in told
    text = "\n".join(records)
    assert "bucket 0 of 1 ('layer.weight')" in text
    assert "rank 1 has not come" in text
    assert not other


def _swallows(rank, world_size, port):
    def body(guard, rank):
        if rank == 1:
            raise SystemExit(5)
        while True:  # user code that catches everything
            try:
                time.sleep(30)
            except BaseException:
                continue

    return guarded(rank, world_size, port, body)


def test_a_rank_that_cannot_be_interrupted_ends_itself_with_the_first_ranks_code():
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(_swallows, 2, grace_s=12)
    assert caught.value.exit_codes[0] == 5
    assert time.monotonic() - begin < 10


def _blocked_for_good(rank, world_size, port):
    def body(guard, rank):
        if rank == 1:
            guard.sockets._known.clear()  # this rank's connections stay open
            try:
                raise ValueError("caught later")
            except ValueError as error:
                guard._failed(error)
            time.sleep(8)
            return
        dist.all_reduce(torch.ones(2))  # waits in C++: only a cut connection ends it

    return guarded(rank, world_size, port, body)


def test_a_rank_blocked_in_a_collective_is_freed_by_cutting_its_connections():
    told = ranks(_blocked_for_good, 2)[0]
    assert isinstance(told["error"], RankFailedError)
    assert told["seconds"] < 8, "not by the other's end"


def _fine(rank, world_size, port):
    def body(guard, rank):
        for _ in range(20):
            collective(guard, rank)
        guard.barrier("end", dist.barrier)
        time.sleep(1.5 * rank)  # ranks leave at different times

    return guarded(rank, world_size, port, body)


def test_a_run_without_failure_ends_without_one():
    for told in ranks(_fine, 3):
        assert "error" not in told
        assert told["finally"]
        assert told["rest"] == []
