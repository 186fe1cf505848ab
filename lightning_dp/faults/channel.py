"""The failure channel: a few keys in a store that every rank can reach, and nothing that blocks.

A store is asked only for keys that are known to exist, because ``get`` waits for a missing one. Every call
is a round trip of well under a millisecond to the process that hosts the store.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import CollectiveError
from lightning_dp.faults.record import FailureRecord
from lightning_dp.faults.store import Store

_FIRST = "first"


class FailureChannel:
    """What the ranks tell each other when something goes wrong.

    Args:
        store: Reached by all ranks, with a prefix of its own. Not used by another thread at the same time
            for anything that blocks.
        rank: This rank.
        world_size: How many ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._others = [other for other in range(world_size) if other != rank]

    # Failures

    def publish(self, record: FailureRecord) -> FailureRecord:
        """Report a failure; return the record that was first, which may be another rank's.

        Collective: none. Any rank at any time; atomic in the store.
        """
        text = record.to_json()
        winner = FailureRecord.from_json(self._store.compare_set(_FIRST, "", text))
        self._store.set(f"error/{record.rank}", text)
        return winner

    def first(self) -> FailureRecord | None:
        """The first failure of any rank, or None. Collective: none."""
        text = self.read(_FIRST)
        return FailureRecord.from_json(text) if text else None

    def acknowledge(self) -> None:
        """Say that this rank has read the first failure. Collective: none."""
        self._store.set(f"seen/{self.rank}", "1")

    def all_acknowledged(self, *, without: int = -1) -> bool:
        """Whether all other ranks have read the first failure, or left before. Collective: none.

        Args:
            without: A rank that cannot any more.
        """
        return all(
            self._store.check([f"seen/{rank}"]) or self.has_left(rank)
            for rank in self._others
            if rank != without
        )

    # Who is there

    def ping(self) -> str:
        """Ask all ranks whether they are there; return the ping's name. Collective: none."""
        ping = secrets.token_hex(4)
        self._store.set("ping", ping)
        return ping

    def answer_ping(self, answered: str) -> str:
        """Answer the latest ping, unless it is ``answered``; return its name. Collective: none."""
        ping = self.read("ping") or ""
        if ping != answered:
            self._store.set(f"answer/{ping}/{self.rank}", "1")
        return ping

    def unanswered(self, ping: str) -> list[int]:
        """Other ranks that have neither answered nor left. Collective: none."""
        return [
            rank
            for rank in self._others
            if not self._store.check([f"answer/{ping}/{rank}"]) and not self.has_left(rank)
        ]

    def leave(self) -> None:
        """Say that this rank leaves normally. Collective: none."""
        self._store.set(f"left/{self.rank}", "1")

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has left normally. Collective: none."""
        return self._store.check([f"left/{rank}"])

    def gone(self) -> list[int]:
        """Other ranks that have left normally. Collective: none."""
        return [rank for rank in self._others if self.has_left(rank)]

    # Plain values

    def read(self, key: str) -> str | None:
        """The value of ``key``, or None where nobody has set it. Collective: none."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def write(self, key: str, value: str) -> None:
        """Set ``key``. Collective: none."""
        self._store.set(key, value)

    def write_once(self, key: str, value: str) -> str:
        """Set ``key`` if nobody has; return what it holds. Collective: none."""
        return self._store.compare_set(key, "", value).decode()

    def forget(self, key: str) -> None:
        """Remove ``key``, if it is there. Collective: none."""
        self._store.delete_key(key)

    def read_ranks(self, prefix: str) -> dict[int, Any]:
        """JSON values of ``prefix/<rank>`` for the ranks that have set one. Collective: none."""
        texts = {rank: self.read(f"{prefix}/{rank}") for rank in range(self.world_size)}
        return {rank: json.loads(text) for rank, text in texts.items() if text is not None}

    def agree_any(self, name: str, value: bool, *, timeout_s: float) -> bool:
        """Whether any rank passes True. ``name`` must be new for each agreement and the same on all ranks.

        Args:
            name: Names this agreement.
            value: This rank's vote.
            timeout_s: Seconds to wait for the other ranks.

        Raises:
            CollectiveError: Not all ranks voted in time.

        Collective: every rank, once per name. Blocks until all have voted; the wait can be interrupted.
        """
        self._store.add(f"{name}/any", int(value))
        self._store.add(f"{name}/count", 1)
        if not poll_until(
            lambda: self._store.add(f"{name}/count", 0) >= self.world_size, timeout_s
        ):
            count = self._store.add(f"{name}/count", 0)
            raise CollectiveError(
                f"[lean_ddp rank {self.rank}/{self.world_size}] only {count} of {self.world_size} "
                f"ranks came to '{name}' within {timeout_s:.0f} s."
            )
        return self._store.add(f"{name}/any", 0) > 0
