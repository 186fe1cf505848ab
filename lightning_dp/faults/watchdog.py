"""The watchdog: one thread per rank that looks for the first failure of any rank and acts on it.

[Note: escalation] A rank that must stop because another one failed is first interrupted: an exception in
the thread that trains, so that ``finally`` blocks and ``on_exception`` hooks run. If it does not leave
within ``error_grace_s`` it sits in a call that Python cannot interrupt; then the connections underneath are
cut, which makes such a call fail. If that does not help either within another ``error_grace_s``, the
process ends itself, with every thread's stack on stderr. Nobody ends anybody else's process here.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch.distributed as dist

from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.interrupt import Interrupter
from lightning_dp.faults.liveness import parent_has_gone
from lightning_dp.faults.peers import Peers
from lightning_dp.faults.record import FailureRecord, first_line
from lightning_dp.faults.sockets import GroupSockets
from lightning_dp.faults.store import empty_store
from lightning_dp.faults.waits import (
    ADVICE,
    Waits,
    describe_place,
    describe_stall,
    find_deadlock,
)

log = logging.getLogger(__name__)

PERIOD_S = 0.5
HURRIED_PERIOD_S = 0.1
HEARTBEAT_S = 5.0
_REPORT_WAITS_AFTER_S = 1.0
_DEADLOCK_AFTER_S = 2.0


@dataclass(eq=False)
class Watchdog:
    """Watches the other ranks while this one is in a call of the trainer.

    Args:
        channel: A channel of its own (its store client is used by no other thread).
        peers: The processes of all ranks.
        waits: What this rank waits for.
        interrupter: Reaches the thread that trains.
        sockets: Connections of the process groups.
        error_grace_s: Seconds between two steps of the escalation.
        stall_report_s: Seconds after which a wait is reported; 0 for never.
        parent_pid: If given, this process ends when that parent has gone.
        where: Says what this rank is doing.
        groups: The process groups in which this rank may be blocked.
        each_look: Called at each look.
    """

    channel: FailureChannel
    peers: Peers
    waits: Waits
    interrupter: Interrupter
    sockets: GroupSockets
    _: KW_ONLY
    error_grace_s: float
    stall_report_s: float
    parent_pid: int | None
    where: Callable[[], str]
    groups: Callable[[], Sequence[dist.ProcessGroup]]
    each_look: Callable[[FailureChannel], None]

    def __post_init__(self) -> None:
        self.first: FailureRecord | None = None
        self.unwinding = False  # the training thread is on its way out already
        self._told_at = 0.0
        self._cut = False
        self._answered = ""
        self._heartbeats = 0
        self._next_heartbeat = 0.0
        self._suspect: tuple[tuple[int, str, int], ...] | None = None
        self._stop = threading.Event()
        self._period_s = PERIOD_S
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lean-ddp-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns when the thread has ended, or after two periods."""
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * PERIOD_S)

    def hurry(self) -> None:
        """Look at once, and often: the training thread has seen something."""
        self._period_s = HURRIED_PERIOD_S
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._period_s)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._look()
            except (dist.DistError, RuntimeError) as error:
                if self._stop.is_set() or self.peers.store_host_left:
                    return
                self._store_lost(error)

    def _look(self) -> None:
        """One round."""
        if self.parent_pid is not None and parent_has_gone(self.parent_pid):
            self._exit("the process that started this rank has gone", 1)
        self.interrupter.ctrl_c.look()
        self._answered = self.channel.answer_ping(self._answered)
        if self.first is None:
            self.first = self.channel.first() or self.peers.find_dead(self.channel)
        if self.first is None and self.interrupter.ctrl_c.is_stuck(self.error_grace_s):
            record = FailureRecord.interrupted(self.channel.rank, self.where())
            self.first = self.channel.publish(record)
        if self.first is not None:
            self._act(self.first)
            return
        self._tell()
        self.each_look(self.channel)

    # Failure

    def _act(self, record: FailureRecord) -> None:
        """Bring the training thread to an end ([Note: escalation])."""
        now = time.monotonic()
        if not self._told_at:
            self._told_at = now
            self.channel.acknowledge()
            if not self.unwinding:
                log.error("lean_ddp: %s", record.headline())
        if self.unwinding:
            return
        rank, world_size = self.channel.rank, self.channel.world_size
        waited = now - self._told_at
        if waited > 2 * self.error_grace_s:
            self._exit(record.headline(), record.exit_code)
        if waited > self.error_grace_s and not self._cut:
            self._cut = True
            end_collectives(self.groups(), self.sockets.close_all)
        if record.rank != rank:  # its own Ctrl+C is raised as soon as it looks
            self.interrupter.fire(lambda: record.to_error(rank, world_size))

    def _store_lost(self, error: BaseException) -> None:
        """The process that hosts the store has gone, and the store with it."""
        if self.first is None:
            self.first = self.peers.store_lost(first_line(str(error)) or type(error).__name__)
            self._told_at = time.monotonic()
            log.error("lean_ddp: %s", self.first.headline())
        if self.unwinding:
            self._stop.set()
            return
        # Nobody hears what is said from here on.
        self.channel = FailureChannel(empty_store(), self.channel.rank, self.channel.world_size)
        self._act(self.first)

    def _exit(self, why: str, code: int) -> None:
        """The last resort."""
        rank = self.channel.rank
        sys.stderr.write(f"[lean_ddp rank {rank}] {why}; this process did not stop: ending it.\n")
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)

    # Reports

    def _tell(self) -> None:
        """Publish what this rank waits for; explain a stall; prove a deadlock."""
        now = time.monotonic()
        wait = self.waits.look()
        age = now - wait.since if wait is not None else 0.0
        if age < _REPORT_WAITS_AFTER_S and now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_S
        self._heartbeats += 1
        report = {**self.waits.report(), "heartbeat": self._heartbeats}
        self.channel.write(f"heartbeat/{self.channel.rank}", json.dumps(report))
        if wait is None or age < _DEADLOCK_AFTER_S:
            self._suspect = None
            return
        reports = self.channel.read_ranks("heartbeat")
        for rank in self.peers.left & set(reports):
            reports[rank] = {**reports[rank], "gone": True, "what": "", "heartbeat": -1}
        self._check_deadlock(reports)
        if self.stall_report_s and age > self.stall_report_s and not wait.reported:
            wait.reported = True
            text = describe_stall(self.channel.rank, wait, reports)
            log.warning("lean_ddp: no progress.\n%s", text)

    def _check_deadlock(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Report a deadlock that two looks have shown, each of its ranks having told anew between them."""
        found = find_deadlock(reports)
        now = None
        if found is not None:
            now = tuple((rank, reports[rank]["what"], reports[rank]["heartbeat"]) for rank in found)
        before, self._suspect = self._suspect, now
        if now is None or before is None or [n[:2] for n in now] != [b[:2] for b in before]:
            return
        if any(new[2] == old[2] != -1 for new, old in zip(now, before, strict=True)):
            self._suspect = before  # one has not told anew
            return
        places = [f"rank {rank} {describe_place(reports[rank])}" for rank, _, _ in now]
        self.channel.publish(
            FailureRecord(
                rank=-1,
                error_type="deadlock",
                message=f"ranks wait for each other: {'; '.join(places)}. {ADVICE}",
                host="the ranks",
                where=self.where(),
            )
        )


def end_collectives(groups: Sequence[dist.ProcessGroup], cut_sockets: Callable[[], Any]) -> None:
    """Break the collectives that this rank may be blocked in. Local.

    NCCL's are aborted first: one that loses its connections ends the whole process, before the error
    could be told. gloo's end with their connections.
    """
    nccl = [group for group in groups if "nccl" in dist.get_backend(group)]
    for group in nccl:
        group.abort()
    cut_sockets()
    for group in groups:
        if group not in nccl:
            group.abort()
