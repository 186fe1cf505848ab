"""Which ranks have died without a word, and which have left normally.

Three sources: a launcher knows how its children ended; processes of the same machine can be looked up; the
rest say now and then that they live, and a rank that has been silent for a minute counts as lost. A minute,
because a thread that holds Python's lock in one long call cannot speak.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.liveness import ProcessIdentity
from lightning_dp.faults.record import FailureRecord

SILENCE_S = 60.0
_HEARTBEATS_EVERY_S = 5.0
_SURE_AFTER_S = 0.8  # a launcher that knows the exit code speaks first


class Peers:
    """The processes of all ranks.

    Args:
        processes: By rank.
        rank: This rank.
        children: Exit codes by rank of children that have ended; None for a process without children.
        store_host: The rank whose process hosts the store; -1 where none does.
    """

    def __init__(
        self,
        processes: Sequence[ProcessIdentity],
        rank: int,
        children: Callable[[], Mapping[int, int]] | None,
        store_host: int,
    ) -> None:
        self.left: set[int] = set()
        self.store_host = store_host
        self._rank = rank
        self._children = children
        self._processes = processes
        self._local = [r for r, p in enumerate(processes) if r != rank and p.is_local()]
        remote = [r for r in range(len(processes)) if r != rank and r not in self._local]
        # One rank listens to all, all listen to one: the store's work grows with the world, not its square.
        self._remote = remote if rank == 0 else [r for r in remote if r == 0]
        self._missing_since: dict[int, float] = {}
        self._heard: dict[int, tuple[int, float]] = {}
        self._next_heartbeats = 0.0

    @property
    def store_host_left(self) -> bool:
        """Whether the process that hosts the store has left the trainer normally."""
        return self.store_host in self.left

    def find_dead(self, channel: FailureChannel) -> FailureRecord | None:
        """A rank that has died without a word, published as the first failure; None if all is well.

        Collective: none.
        """
        self._note_left(channel)
        for rank, code in (self._children() if self._children is not None else {}).items():
            if rank not in self.left:
                return self._publish(channel, rank, *describe_exit(code))
        for rank in self._local:
            if rank in self.left or self._processes[rank].is_alive():
                continue
            since = self._missing_since.setdefault(rank, time.monotonic())
            if time.monotonic() - since > _SURE_AFTER_S:
                return self._publish(channel, rank, "its process has ended without a word", 1)
        for rank in self._silent(channel):
            what = f"nothing was heard of it for {SILENCE_S:.0f} s"
            return self._publish(channel, rank, what, 1)
        return None

    def store_lost(self, why: str) -> FailureRecord:
        """The failure of the process that hosts the store, which took the store with it."""
        message = f"the process that hosts the ranks' store has gone ({why})"
        if self.store_host < 0:
            return FailureRecord(-1, "connection lost", message, host="the launching process")
        process = self._processes[self.store_host]
        host = "this machine" if process.is_local() else "another machine"
        return FailureRecord(
            self.store_host, "connection lost", message, host=host, pid=process.pid
        )

    def _note_left(self, channel: FailureChannel) -> None:
        watched = {*self._local, *self._remote, *({self.store_host} - {-1, self._rank})}
        for rank in watched - self.left:
            if channel.read(f"left/{rank}") is not None:
                self.left.add(rank)

    def _silent(self, channel: FailureChannel) -> list[int]:
        now = time.monotonic()
        if now < self._next_heartbeats:
            return []
        self._next_heartbeats = now + _HEARTBEATS_EVERY_S
        silent = []
        for rank in self._remote:
            text = channel.read(f"heartbeat/{rank}")
            heartbeat = int(json.loads(text)["heartbeat"]) if text else 0
            last, heard_at = self._heard.get(rank, (-1, now))
            if heartbeat != last:
                self._heard[rank] = (heartbeat, now)
            elif now - heard_at > SILENCE_S and rank not in self.left:
                silent.append(rank)
        return silent

    def _publish(self, channel: FailureChannel, rank: int, what: str, code: int) -> FailureRecord:
        process = self._processes[rank]
        host = "this machine" if process.is_local() else "another machine"
        record = FailureRecord(rank, what, "", exit_code=code, host=host, pid=process.pid)
        return channel.publish(record)


def describe_exit(code: int) -> tuple[str, int]:
    """Words for a child's return code, and the code with which its launcher should end."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"it was ended by {name}", 1
    return f"it ended with exit code {code}", code or 1
