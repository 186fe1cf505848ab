"""What a rank is waiting for, told so that a stall can be explained and a deadlock proven.

[Note: when a deadlock is certain] A collective ends only when all ranks have come to it. If every rank
waits in a collective and these are not the same one, none can end. That is certain, not a matter of
patience; a rank that still computes, or one whose report is old, makes it uncertain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_dp.errors import some_names


@dataclasses.dataclass
class Wait:
    """One wait.

    Attributes:
        what: What is waited for ("barrier 'post_setup'", "bucket 3 of 7").
        since: ``time.monotonic()`` at its start.
        serial: How many waits this rank has begun, this one included.
        names: Parameters in it, where there are any.
        reported: Whether a stall was reported.
    """

    what: str
    since: float
    serial: int
    names: tuple[str, ...] = ()
    reported: bool = False


class Waits:
    """What the training thread waits for now; written by it, read by the watching thread.

    Attributes:
        current: A wait inside of :meth:`waiting`.
        source: Asked otherwise: what the engine waits for, and the parameters in it.
    """

    def __init__(self) -> None:
        self.current: Wait | None = None
        self.source: Callable[[], tuple[str, tuple[str, ...]] | None] | None = None
        self._serial = 0
        self._seen: Wait | None = None

    @contextlib.contextmanager
    def waiting(self, what: str, names: tuple[str, ...] = ()) -> Iterator[None]:
        """This thread waits for ``what`` inside the ``with`` block."""
        self._serial += 1
        outer = self.current
        self.current = Wait(what, time.monotonic(), self._serial, names)
        try:
            yield
        finally:
            self.current = outer

    def look(self) -> Wait | None:
        """What is waited for now; called by the watching thread.

        What ``source`` tells has no beginning; it begins when it is first seen here.
        """
        wait = self.current
        told = self.source() if wait is None and self.source is not None else None
        if wait is not None or told is None:
            self._seen = None
            return wait
        if self._seen is None or (self._seen.what, self._seen.names) != told:
            self._serial += 1
            self._seen = Wait(told[0], time.monotonic(), self._serial, told[1])
        return self._seen

    def to_json(self) -> dict[str, Any]:
        """This rank's report for the others."""
        wait = self.look()
        if wait is None:
            return {"what": "", "serial": self._serial, "age_s": 0.0, "names": []}
        age = time.monotonic() - wait.since
        return {"what": wait.what, "serial": wait.serial, "age_s": age, "names": wait.names[:6]}


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
        if other != rank and report.get("what") != wait.what
    ]
    for other in late[:16]:
        report = reports[other]
        doing = f"waits for {report['what']}" if report.get("what") else "is running its own code"
        where = f" at {report['where']}" if report.get("where") else ""
        lines.append(f"  rank {other} has not come: it {doing}{where}.")
    if not late:
        lines.append("  all ranks have come to it; the network or the collective itself is slow.")
    return "\n".join(lines)


def find_deadlock(
    world_size: int, reports: Mapping[int, Mapping[str, Any]], *, min_age_s: float
) -> str | None:
    """Explain a deadlock, if it is certain.

    Args:
        world_size: How many ranks.
        reports: Latest report of each rank. ``gone`` marks a rank that left normally.
        min_age_s: Only waits at least this old count, so that reports are not of different moments.

    Returns:
        Who waits for what, or None.
    """
    if len(reports) < world_size:
        return None
    places: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.get("gone"):
            places.setdefault("its program has left the trainer", []).append(rank)
        elif report.get("what") and report.get("age_s", 0.0) >= min_age_s:
            places.setdefault(f"waits for {report['what']}", []).append(rank)
        else:
            return None
    if len(places) < 2:
        return None
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {place}"
        for place, ranks in places.items()
    )
