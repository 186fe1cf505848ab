"""What a rank is waiting for, told so that a stall can be explained and a deadlock proven.

[Note: when a deadlock is certain] Collectives of one kind are numbered in the order in which a rank
begins them, the same on all ranks. If rank A waits in one that rank B has not begun, and B waits in one
that A has not begun, neither can go on, however patient one is. A rank that is merely slow to finish has
begun what the other has left behind, so it is never mistaken for one. And if both wait in the same place of
the sequence, but in collectives of different kinds, keys or shapes, neither will get what it waits for.

[Note: who is in what] Two collectives that do not belong together may also complete, with one key's value
in the place of another's. So ranks compare what they enter before they enter it: the first to come writes
its name under the number, the others compare theirs. That is one round trip to the store; after the first
thousand, where a program repeats itself, the names of sixteen are compared at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

from lightning_dp.errors import some_names
from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.record import FailureRecord
from lightning_dp.internals.stacks import user_line

GRADIENTS, OPENINGS, COLLECTIVES = "gradients", "openings", "collectives"
ADVICE = (
    "Something that all ranks must call (save_checkpoint, a barrier, self.log with sync_dist, "
    "trainer.log_dir, a training step) was called on some of them only, or with other keys or shapes. Fix: "
    "call it on every rank, not inside 'if rank == 0'; log the same keys in the same order on all of them; "
    "set trainer.should_stop on all of them ("
    "strategy.reduce_boolean_decision(stop, all=False) is the same on each)"
)
COMPARE_ALL, COMPARE_EVERY = 1000, 16


@dataclasses.dataclass
class Wait:
    """One wait.

    Attributes:
        kind: ``GRADIENTS``, ``OPENINGS`` or ``COLLECTIVES``.
        number: Its place in the sequence of its kind.
        what: What is waited for ("barrier 'post_setup'", "the gradients of step 3").
        since: ``time.monotonic()`` at its start.
        names: Parameters in it, where there are any.
        reported: Whether a stall was reported.
    """

    kind: str
    number: int
    what: str
    since: float
    names: tuple[str, ...] = ()
    reported: bool = False


@dataclasses.dataclass(frozen=True)
class EngineWait:
    """What the engine tells when it is asked.

    Attributes:
        begun: How many reducing backwards it has begun to send.
        what: What it waits for now; empty if it does not wait.
        names: The parameters in it.
        openings: How many times ranks compared what they are going to send.
        kind: ``GRADIENTS`` or ``OPENINGS``: what it waits for.
    """

    begun: int
    what: str = ""
    names: tuple[str, ...] = ()
    openings: int = 0
    kind: str = GRADIENTS


class Waits:
    """What the training thread waits for now; written by it, read by the watchdog.

    Attributes:
        last: What was waited for last, by the training thread itself.
    """

    def __init__(self) -> None:
        self.last = ""
        self._current: Wait | None = None
        self._seen: Wait | None = None
        self._channel: FailureChannel | None = None
        self._engine: Callable[[], EngineWait] = _no_engine
        self._where: Callable[[], str] = str
        self._thread_id = 0
        self._begun = 0
        self._unchecked: list[tuple[str, str]] = []

    def open(
        self,
        channel: FailureChannel,
        engine: Callable[[], EngineWait],
        where: Callable[[], str],
    ) -> None:
        """All ranks have met, and count from here. Called by the thread that trains.

        Args:
            channel: For that thread.
            engine: What the engine waits for; called by the watchdog.
            where: What this rank is doing, in words.

        Collective: none.
        """
        self._channel, self._engine, self._where = channel, engine, where
        self._thread_id = threading.get_ident()
        self._begun = 0
        self._unchecked = []

    def close(self) -> None:
        """Compare nothing any more."""
        self._channel, self._engine = None, _no_engine

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This thread waits inside the ``with`` block for a collective that all ranks call in one order.

        Args:
            what: Its kind, with key and shape where all ranks must have the same.

        Raises:
            RankFailedError: Another rank is in a collective of another kind, key or shape.

        Collective: none; ranks are compared over the failure channel ([Note: who is in what]).
        """
        self._begun += 1
        self.last = what
        if self._channel is not None:
            self._compare(self._channel, what)
        outer = self._current
        self._current = Wait(COLLECTIVES, self._begun, what, time.monotonic())
        try:
            yield
        finally:
            self._current = outer

    def _compare(self, channel: FailureChannel, what: str) -> None:
        number = self._begun
        self._unchecked.append((what, user_line()))
        if number > COMPARE_ALL and number % COMPARE_EVERY:
            return
        mine, self._unchecked = self._unchecked, []
        text = channel.write_once(f"collectives/{number}", json.dumps([channel.rank, mine]))
        if channel.rank == 0 and number > COMPARE_ALL:
            channel.forget(f"collectives/{number - 32 * COMPARE_EVERY}")
        other, theirs = json.loads(text)
        for (here, line), (there, their_line) in zip(mine, theirs, strict=True):
            if here != there:
                message = (
                    f"rank {channel.rank} came to {here}{_at(line)}, rank {other} to "
                    f"{there}{_at(their_line)}. {ADVICE}"
                )
                kind, where = "collectives differ", self._where()
                record = FailureRecord(-1, kind, message, host="the ranks", where=where)
                raise channel.publish(record).to_error(channel.rank, channel.world_size)

    def look(self) -> Wait | None:
        """What is waited for now. What the engine tells begins when it is first seen here."""
        if self._current is not None:
            return self._current
        engine = self._engine()
        if not engine.what:
            self._seen = None
        elif self._seen is None or (self._seen.what, self._seen.names) != (
            engine.what,
            engine.names,
        ):
            number = engine.begun if engine.kind == GRADIENTS else engine.openings
            self._seen = Wait(engine.kind, number, engine.what, time.monotonic(), engine.names)
        return self._seen

    def report(self) -> dict[str, Any]:
        """This rank's report for the others, as JSON."""
        wait = self.look()
        engine = self._engine()
        begun = {COLLECTIVES: self._begun, GRADIENTS: engine.begun, OPENINGS: engine.openings}
        line = user_line(self._thread_id)
        place = {"where": self._where(), "line": line, "begun": begun}
        if wait is None:
            return {"what": "", **place}
        return {"what": wait.what, "kind": wait.kind, "number": wait.number, **place}


def _no_engine() -> EngineWait:
    return EngineWait(0)


def describe_stall(rank: int, wait: Wait, reports: Mapping[int, Mapping[str, Any]]) -> str:
    """A report: what ``rank`` waits for, and where the other ranks are.

    Args:
        rank: Who reports.
        wait: Its wait.
        reports: Latest report of each rank, by rank; ranks without one have not started.
    """
    age = time.monotonic() - wait.since
    names = f" ({some_names(wait.names)})" if wait.names else ""
    lines = [f"rank {rank} has waited {age:.0f} s for {wait.what}{names}."]
    late = [
        other
        for other, report in sorted(reports.items())
        if other != rank and not _has_begun(report, wait.kind, wait.number)
    ]
    for other in late[:16]:
        report = reports[other]
        doing = f"waits for {report['what']}" if report.get("what") else "is running its own code"
        where = f" at {report['where']}" if report.get("where") else ""
        lines.append(f"  rank {other} has not come: it {doing}{where}{_at(report.get('line'))}.")
    if not late:
        lines.append("  all ranks have come to it; the network or the collective itself is slow.")
    return "\n".join(lines)


def find_deadlock(reports: Mapping[int, Mapping[str, Any]]) -> tuple[int, int] | None:
    """Two ranks that wait for each other for good ([Note: when a deadlock is certain]).

    Args:
        reports: A report of each rank. ``gone`` marks a rank that has left, with what it had begun.

    Returns:
        The two ranks, the first of which waits; None if there are none.
    """
    for one, other in permutations(sorted(reports), 2):
        mine, theirs = reports[one], reports[other]
        if not mine.get("what"):
            continue
        if _is_beside(mine, theirs):
            return one, other
        if _has_begun(theirs, mine["kind"], mine["number"]):
            continue
        if theirs.get("gone"):
            return one, other
        if theirs.get("what") and not _has_begun(mine, theirs["kind"], theirs["number"]):
            return one, other
    return None


def describe_place(report: Mapping[str, Any]) -> str:
    """Where a rank is, in words."""
    if report.get("gone"):
        return "has left the trainer"
    return f"waits for {report['what']}{_at(report.get('line'))}"


def _at(line: str | None) -> str:
    return f" ({line})" if line else ""


def _is_beside(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two ranks are in the same place of the sequence, in different collectives."""
    places = [(report.get("kind"), report.get("number")) for report in (mine, theirs)]
    differs = theirs.get("what") and mine["what"] != theirs["what"]
    return bool(differs and places[0] == places[1] and mine["kind"] == COLLECTIVES)


def _has_begun(report: Mapping[str, Any], kind: str, number: int) -> bool:
    return bool(report.get("begun", {}).get(kind, 0) >= number)
