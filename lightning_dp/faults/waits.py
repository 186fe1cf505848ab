"""What a rank is waiting for, told so that a stall can be explained and a deadlock proven.

[Note: when a deadlock is certain] Collectives of one kind are numbered in the order in which a rank
begins them, the same on all ranks. If rank A waits in one that rank B has not begun, and B waits in one
that A has not begun, neither can go on, however patient one is. A rank that is merely slow to finish has
begun what the other has left behind, so it is never mistaken for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

from lightning_dp.errors import some_names

GRADIENTS, COLLECTIVES = "gradients", "collectives"
ADVICE = (
    "Something that all ranks must call (save_checkpoint, a barrier, self.log with sync_dist, a training "
    "step) was called on some of them only. Fix: call it on every rank, not inside 'if rank == 0'"
)


@dataclasses.dataclass
class Wait:
    """One wait.

    Attributes:
        kind: ``GRADIENTS`` or ``COLLECTIVES``.
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
        begun: How many reducing backwards it has begun.
        what: What it waits for now; empty if it does not wait.
        names: The parameters in it.
    """

    begun: int
    what: str = ""
    names: tuple[str, ...] = ()


class Waits:
    """What the training thread waits for now; written by it, read by the watching thread.

    Attributes:
        engine: Asked what the engine waits for; called by the watching thread.
        last: What was waited for last, by the training thread itself.
    """

    def __init__(self, engine: Callable[[], EngineWait] = lambda: EngineWait(0)) -> None:
        self.engine = engine
        self.last = ""
        self._current: Wait | None = None
        self._begun = 0
        self._seen: Wait | None = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This thread waits inside the ``with`` block for a collective that all ranks call in one order."""
        self._begun += 1
        self.last = what
        outer = self._current
        self._current = Wait(COLLECTIVES, self._begun, what, time.monotonic())
        try:
            yield
        finally:
            self._current = outer

    def look(self) -> Wait | None:
        """What is waited for now. What the engine tells begins when it is first seen here."""
        if self._current is not None:
            return self._current
        told = self.engine()
        if not told.what:
            self._seen = None
        elif self._seen is None or (self._seen.what, self._seen.names) != (told.what, told.names):
            self._seen = Wait(GRADIENTS, told.begun, told.what, time.monotonic(), told.names)
        return self._seen

    def report(self) -> dict[str, Any]:
        """This rank's report for the others, as JSON."""
        wait = self.look()
        begun = {COLLECTIVES: self._begun, GRADIENTS: self.engine().begun}
        if wait is None:
            return {"what": "", "begun": begun}
        return {"what": wait.what, "kind": wait.kind, "number": wait.number, "begun": begun}


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
        lines.append(f"  rank {other} has not come: it {doing}{where}.")
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
        if not mine.get("what") or _has_begun(theirs, mine["kind"], mine["number"]):
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
    return f"waits for {report['what']}"


def _has_begun(report: Mapping[str, Any], kind: str, number: int) -> bool:
    return bool(report.get("begun", {}).get(kind, 0) >= number)
