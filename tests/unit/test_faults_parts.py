"""Parts of the failure channel that need no second process."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_dp.errors import CollectiveError, RankFailedError
from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.ctrl_c import CtrlC
from lightning_dp.faults.interrupt import Interrupter
from lightning_dp.faults.liveness import ProcessIdentity
from lightning_dp.faults.peers import Peers, describe_exit
from lightning_dp.faults.preemption import StopLine
from lightning_dp.faults.record import FailureRecord, brief_of, exit_code_of, is_consequence
from lightning_dp.faults.root_cause import explain
from lightning_dp.faults.store import empty_store
from lightning_dp.faults.waits import (
    COMPARE_ALL,
    COMPARE_EVERY,
    EngineWait,
    Wait,
    Waits,
    describe_stall,
    find_deadlock,
)


def test_a_record_survives_the_store():
    try:
        raise ValueError("boom")
    except ValueError as error:
        record = FailureRecord.from_exception(3, error, "fit, step 7")
    again = FailureRecord.from_json(record.to_json())
    assert again == record
    assert "rank 3" in record.headline()
    assert "fit, step 7" in record.headline()
    told = again.to_error(0, 4)
    assert told.rank == 3
    assert "ValueError: boom" in told.remote_traceback
    assert str(told).startswith("[lean_ddp rank 0/4] rank 3")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (CollectiveError("x"), True),
        (RankFailedError("x"), True),
        (ValueError("boom"), False),
        (RuntimeError("shapes do not match"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_consequences_are_told_from_causes(error, expected):
    assert is_consequence(error) is expected
    outer = KeyError("while handling")
    outer.__context__ = error
    assert is_consequence(outer) is expected


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(5), 5), (SystemExit(0), 1), (SystemExit("x"), 1), (OSError(), 1)],
)
def test_exit_codes(error, code):
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    ("code", "says", "ends_with"),
    [(-9, "SIGKILL", 1), (3, "exit code 3", 3), (0, "exit code 0", 1)],
)
def test_how_a_child_ended(code, says, ends_with):
    what, exit_with = describe_exit(code)
    assert says in what
    assert exit_with == ends_with


def test_the_first_failure_wins_and_is_acknowledged():
    store = empty_store()
    zero, one = FailureChannel(store, 0, 2), FailureChannel(store, 1, 2)
    assert zero.first() is None
    first = FailureRecord(1, "ValueError", "a")
    assert one.publish(first) == first
    assert zero.publish(FailureRecord(0, "KeyError", "b")) == first
    assert not one.all_acknowledged()
    zero.acknowledge()
    assert one.all_acknowledged()


def test_a_process_is_told_from_a_later_one_with_its_number():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mine = ProcessIdentity.of_this_process()
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        identity = ProcessIdentity(child.pid, started, mine.machine)
        assert identity.is_local()
        assert identity.is_alive()
        assert not ProcessIdentity(child.pid, started + 1, mine.machine).is_alive()
        assert not ProcessIdentity(child.pid, started, "elsewhere").is_local()
        child.kill()
        time.sleep(0.1)  # a zombie until it is waited for
        assert not identity.is_alive()
    finally:
        child.kill()
        child.wait()


def test_a_silent_rank_of_another_machine_is_found(monkeypatch):
    from lightning_dp.faults import peers as module

    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    monkeypatch.setattr(module, "_HEARTBEATS_EVERY_S", 0.0)
    mine = ProcessIdentity.of_this_process()
    far = ProcessIdentity(1, 1, "elsewhere")
    channel = FailureChannel(empty_store(), 0, 2)
    peers = Peers([mine, far], 0, dict, 0)
    for heartbeat in range(5):
        channel.write("heartbeat/1", f'{{"heartbeat": {heartbeat}}}')
        assert peers.find_dead(channel) is None
        time.sleep(0.1)
    time.sleep(0.3)
    found = peers.find_dead(channel)
    assert found is not None
    assert found.rank == 1
    assert "nothing was heard" in found.error_type


def test_an_interrupt_ends_a_sleep_and_comes_only_while_armed():
    interrupter = Interrupter()
    timer = threading.Timer(0.1, interrupter.fire, [lambda: RankFailedError("stop", rank=1)])
    begin = time.monotonic()

    def is_interrupted() -> None:
        with interrupter.armed():
            timer.start()
            time.sleep(10)

    with pytest.raises(RankFailedError):
        is_interrupted()
    assert time.monotonic() - begin < 2
    interrupter.fire(lambda: RankFailedError("too late"))
    time.sleep(0.05)


def test_ctrl_c_that_wakes_nobody_is_delivered():
    """A signal that another thread receives ends no system call of the main thread's."""
    ctrl_c, stop = CtrlC(), threading.Event()

    def elsewhere():
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        while not stop.wait(0.05):
            ctrl_c.look()

    previous = signal.signal(signal.SIGURG, lambda *_: None)  # as the interrupter does
    thread = threading.Thread(target=elsewhere)
    begin = time.monotonic()
    try:
        with ctrl_c.watched():
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                time.sleep(10)
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGURG, previous)
    assert time.monotonic() - begin < 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_that_a_destructor_swallows_is_sent_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda what: None)
    ctrl_c = CtrlC()

    class Swallows:
        def __del__(self):
            raise KeyboardInterrupt

    with ctrl_c.watched():
        Swallows()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.look()


def test_ctrl_c_is_stuck_where_the_main_thread_never_looks():
    """In one long call of C, as a collective can be; in another program, for the call cannot be ended."""
    program = (
        "import hashlib, os, signal, threading, time\n"
        "from lightning_dp.faults.ctrl_c import CtrlC\n"
        "ctrl_c = CtrlC()\n"
        "def look():\n"
        "    time.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.2)\n"
        "    ctrl_c.look()\n"
        "    assert not ctrl_c.is_stuck(5.0)\n"
        "    print('STUCK' if ctrl_c.is_stuck(0.0) else 'FREE', flush=True)\n"
        "signal.signal(signal.SIGURG, lambda *_: None)\n"
        "with ctrl_c.watched():\n"
        "    thread = threading.Thread(target=look)\n"
        "    thread.start()\n"
        "    try:\n"
        "        {wait}\n"
        "        time.sleep(5)\n"
        "    except KeyboardInterrupt:\n"
        "        thread.join()\n"
    )
    waits = {
        "STUCK": "hashlib.pbkdf2_hmac('sha256', b'', b'', 9_000_000)",  # more than a second
        "FREE": "pass",
    }
    for told, wait in waits.items():
        text = program.format(wait=wait)
        run = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=60
        )
        assert run.stdout.split() == [told], run.stderr


@pytest.mark.parametrize("owner", ["asyncio", "handler"])
def test_what_the_program_owns_is_left_alone(owner):
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        if owner == "asyncio":
            signal.set_wakeup_fd(write)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with CtrlC().watched():
            if owner == "handler":
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            else:
                assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(read)
        os.close(write)


def test_a_forked_process_does_not_speak_for_its_parent():
    ctrl_c = CtrlC()
    with ctrl_c.watched():
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        ctrl_c.look()
        assert not ctrl_c.is_stuck(0.0)


@pytest.mark.parametrize(
    ("error", "replaced_by", "brief"),
    [
        (ValueError("[lean_ddp rank 1/2] boom"), None, "(as on rank 0, which prints it in full)"),
        (ValueError("another"), None, ""),
        (RuntimeError("Connection closed by peer"), RankFailedError, "rank 0 prints its traceback"),
    ],
)
def test_an_error_is_told_in_full_once(error, replaced_by, brief):
    try:
        raise ValueError("[lean_ddp rank 0/2] boom")
    except ValueError as raised:
        first = FailureRecord.from_exception(0, raised)
    replacement = explain(first, FailureChannel(empty_store(), 1, 2), error)
    assert type(replacement) is (replaced_by or type(None))
    told = brief_of(replacement or error)
    assert brief in told
    assert bool(told) is bool(brief)
    assert hasattr(error, "__notes__") is (not brief)


def test_ctrl_c_is_no_failure_of_a_rank():
    record = FailureRecord.from_exception(2, KeyboardInterrupt(), "fit, train, step 4")
    assert "rank 2" in record.headline()
    assert "was interrupted (Ctrl+C) in fit, train, step 4" in record.headline()
    assert "failed" not in record.headline()
    assert isinstance(record.to_error(0, 4), KeyboardInterrupt)
    lost = RuntimeError("Connection closed by peer")
    assert isinstance(explain(record, FailureChannel(empty_store(), 0, 4), lost), KeyboardInterrupt)


def test_another_thread_is_interrupted_between_bytecodes():
    interrupter, caught = Interrupter(), []

    def work():
        try:
            with interrupter.armed():
                deadline = time.monotonic() + 10
                while time.monotonic() < deadline:
                    time.sleep(0.01)
        except RankFailedError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    interrupter.fire(lambda: RankFailedError("stop", rank=2))
    thread.join(5)
    assert caught[0].rank == 2
    assert str(caught[0]) == "stop"


def waiting(what, kind="collectives", number=1, collectives=0, gradients=0, **more):
    begun = {"collectives": collectives, "gradients": gradients}
    begun[kind] = max(begun[kind], number if what else 0)
    return {"what": what, "kind": kind, "number": number, "begun": begun, "heartbeat": 1, **more}


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        # rank 0 in a barrier of its own, rank 1 in the next step's gradients
        (
            {
                0: waiting("a barrier", number=5, gradients=3),
                1: waiting("gradients", "gradients", 4, collectives=4),
            },
            True,
        ),
        ({0: waiting("a", number=5), 1: waiting("", collectives=4, gone=True)}, True),
        # rank 1 is slow to finish what rank 0 has left behind
        (
            {
                0: waiting("a barrier", number=5, gradients=4),
                1: waiting("gradients", "gradients", 4, collectives=4),
            },
            False,
        ),
        ({0: waiting("a", number=5), 1: waiting("a", number=4)}, False),
        ({0: waiting("a", number=5), 1: waiting("a", number=5)}, False),
        # the same place of the sequence, but other collectives
        ({0: waiting("broadcast", number=5), 1: waiting("a barrier", number=5)}, True),
        # two buckets of one backward are no two collectives
        ({0: waiting("a", "gradients", 5), 1: waiting("b", "gradients", 5)}, False),
        ({0: waiting("a", number=5), 1: waiting("", collectives=4)}, False),
        ({0: waiting("a", number=5), 1: waiting("", collectives=5, gone=True)}, False),
        ({0: waiting("a", number=5)}, False),
    ],
)
def test_only_a_certain_deadlock_is_found(reports, found):
    assert (find_deadlock(reports) is not None) is found


def test_a_stall_says_who_has_not_come():
    since = time.monotonic() - 31
    wait = Wait("gradients", 3, "the gradients of step 3", since, ("a.weight", "a.bias"))
    reports = {
        0: waiting("x", "gradients", 3),
        1: waiting("", gradients=2),
        2: waiting("a barrier", where="fit"),
        3: waiting("x", "gradients", 3),
    }
    text = describe_stall(0, wait, reports)
    assert "31 s" in text
    assert "'a.weight'" in text
    assert "rank 1 has not come: it is running its own code" in text
    assert "rank 2 has not come: it waits for a barrier at fit" in text
    assert "rank 3" not in text


def test_what_the_engine_waits_for_begins_when_it_is_first_seen():
    waits, engine = Waits(), [EngineWait(3, "bucket 1", ("w",))]
    waits.open(FailureChannel(empty_store(), 0, 1), lambda: engine[0], str)
    first = waits.look()
    assert waits.look() is first
    assert first.number == 3
    with waits.waiting("a barrier"):
        assert waits.look().what == "a barrier"
        assert waits.report()["begun"] == {"collectives": 1, "gradients": 3, "openings": 0}
    engine[0] = EngineWait(3)
    assert waits.look() is None
    assert waits.report()["what"] == ""


def stop_lines(world_size):
    store = empty_store()
    return [StopLine(FailureChannel(store, r, world_size), "line") for r in range(world_size)]


def test_ranks_in_lockstep_stop_at_the_same_point():
    lines = stop_lines(3)
    stopped: dict[int, int] = {}
    step = threading.Barrier(3)  # something that all ranks do in every batch

    def run(rank):
        for point in range(100):
            step.wait(10)
            # ranks hear of the request at different points
            if point >= 10 + 3 * rank and lines[rank].is_due(point):
                stopped[rank] = point
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(stopped) == {0, 1, 2}
    assert len(set(stopped.values())) == 1


def test_nobody_stops_if_one_has_come_to_its_end():
    lines = stop_lines(2)
    results = []
    thread = threading.Thread(
        target=lambda: results.append([lines[0].is_due(point) for point in range(1, 8)])
    )
    thread.start()
    assert lines[1].is_due(1) is False
    assert lines[1].is_due(2, is_last=True) is False
    thread.join(10)
    assert results == [[False] * 7]


def test_a_world_of_one_stops_at_once():
    assert StopLine(None, "line").is_due(5)


def test_votes_are_counted():
    channel = FailureChannel(empty_store(), 0, 1)
    assert channel.agree_any("a", True, timeout_s=1)
    assert not channel.agree_any("b", False, timeout_s=1)
    lonely = FailureChannel(empty_store(), 0, 2)
    with pytest.raises(CollectiveError, match="1 of 2"):
        lonely.agree_any("c", True, timeout_s=0.05)


def two_ranks():
    store, ranks = empty_store(), []
    for rank in range(2):
        waits = Waits()
        waits.open(FailureChannel(store, rank, 2), lambda: EngineWait(0), str)
        ranks.append(waits)
    return ranks


def enter(waits, what):
    with waits.waiting(what):
        pass


def test_ranks_compare_what_they_enter_before_they_enter_it():
    zero, one = two_ranks()
    for what in ("barrier 'a'", "reduce of 'loss' ()"):
        enter(zero, what)
        enter(one, what)  # control: the same on both passes
    enter(one, "broadcast")
    with pytest.raises(RankFailedError) as caught:
        enter(zero, "reduce of 'accuracy' ()")
    message = str(caught.value)
    assert "rank 0 came to reduce of 'accuracy' () (test_faults_parts.py:" in message
    assert "rank 1 to broadcast (test_faults_parts.py:" in message
    assert " in enter)" in message


def test_later_the_first_difference_of_several_is_named():
    zero, one = two_ranks()
    for waits in (zero, one):
        for _ in range(COMPARE_ALL + 3):
            enter(waits, "reduce of 'loss' ()")
    enter(zero, "reduce of 'extra' ()")
    for _ in range(COMPARE_EVERY):
        enter(zero, "reduce of 'loss' ()")
    for _ in range(1003, 1007):
        enter(one, "reduce of 'loss' ()")
    with pytest.raises(RankFailedError, match=r"rank 1 came to reduce of 'loss'.*'extra'"):
        enter(one, "reduce of 'loss' ()")


def test_a_long_run_leaves_few_names_in_the_store():
    store = empty_store()
    waits = Waits()
    waits.open(FailureChannel(store, 0, 1), lambda: EngineWait(0), str)
    for _ in range(10 * COMPARE_ALL):
        enter(waits, "reduce of 'loss' ()")
    assert store.num_keys() < 1.2 * COMPARE_ALL
