"""Which ranks have died without a word, and which have left normally.

Three sources: a launcher knows how its children ended; processes of the same machine can be looked up; the
rest say now and then that they live, and a rank that has been silent for a minute counts as lost. A minute,
because a thread that holds Python's lock in one long call cannot speak.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_dp.errors import RankFailedError
from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.liveness import ProcessIdentity
from lightning_dp.faults.record import FailureRecord, signal_name

SILENCE_S = 60.0
_HEARTBEATS_EVERY_S = 5.0
_SURE_AFTER_S = 0.8  # a launcher that knows the exit code speaks first


class Peers:
    """The processes of all ranks.

    Args:
        processes: By rank.
        rank: This rank.
        children: Exit codes by rank of children that have ended.
        store_host: The rank whose process hosts the store; -1 where none does.
    """

    def __init__(
        self,
        processes: Sequence[ProcessIdentity],
        rank: int,
        children: Callable[[], Mapping[int, int]],
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
        watched = {*self._local, *self._remote, *({self.store_host} - {-1, self._rank})}
        self.left |= {rank for rank in watched - self.left if channel.has_left(rank)}
        for rank, code in self._children().items():
            if rank not in self.left:
                what, exit_with = describe_exit(code)
                return channel.publish(self._record(rank, what, exit_code=exit_with))
        for rank in self._local:
            if rank in self.left or self._processes[rank].is_alive():
                continue
            since = self._missing_since.setdefault(rank, time.monotonic())
            if time.monotonic() - since > _SURE_AFTER_S:
                what = "its process has ended without a word"
                return channel.publish(self._record(rank, what))
        for rank in self._silent(channel):
            what = f"nothing was heard of it for {SILENCE_S:.0f} s"
            return channel.publish(self._record(rank, what))
        return None

    def store_lost(self, why: str) -> FailureRecord:
        """The failure of the process that hosts the store, which took the store with it."""
        message = f"the process that hosts the ranks' store has gone ({why})"
        if self.store_host < 0:
            return FailureRecord(-1, "connection lost", message, host="the launching process")
        return self._record(self.store_host, "connection lost", message)

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

    def _record(
        self, rank: int, what: str, message: str = "", *, exit_code: int = 1
    ) -> FailureRecord:
        process = self._processes[rank]
        host = "this machine" if process.is_local() else "another machine"
        return FailureRecord(rank, what, message, exit_code=exit_code, host=host, pid=process.pid)


def describe_exit(code: int) -> tuple[str, int]:
    """Words for a child's return code, and the code with which its launcher should end."""
    if code < 0:
        return f"it was ended by {signal_name(-code)}", 1
    return f"it ended with exit code {code}", code or 1


def exit_error(rank: int, code: int, when: str, who: str = "[lean_ddp]") -> RankFailedError:
    """The error that ``rank``, whose process has ended with the return code ``code``, is for the others."""
    what, exit_with = describe_exit(code)
    text = f"{who} rank {rank} failed {when}: {what}. Its own output says why."
    return RankFailedError(text, rank=rank, exit_code=exit_with)
