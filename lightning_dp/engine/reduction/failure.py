"""When a rank's backward raises: what it still sends, and what the others make of it.

[Note: who sends what] A failing rank never enters a collective that the others do not enter, and leaves
none of theirs without it, as far as it can:

    the failing rank                                    the others
    --------------------------------------------------  --------------------------------------------------
    1. publishes its error (the failure channel)        are interrupted by the watchdog, at the latest
    2. was still opening: waits for the opening         open, and go on
    3. sends the buckets that are missing, as zeros     wait for their buckets
    4. sends the control block with ERROR and its       read ERROR: no second round, no exchange of names;
       number, in the last bucket, or in the small      raise RankFailedError
       message where no bucket can carry it (half       (reads that come a step late: before anything of the
       precision, comm hooks)                           next reduction is sent)
    5. before buckets exist: sends a profile with the   are agreeing on buckets: find the error there
       error in place of the control block
    6. cannot send (its wire is broken, a hook raised,  wait, until the watchdog ends them
       it was interrupted while it sent: what came
       next could meet another bucket of theirs)

Nothing else is exchanged afterwards, so it does not matter whether the others read the block at once or a
step later. Every wait of the failing rank is bounded: what is not done within ``GIVE_UP_S`` is left to
the watchdog.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.control import Control
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import Layout
from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import LateGradientError, RankFailedError, some_names

GIVE_UP_S = 5.0


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Supervision:
    """What the engine says to whoever watches over the ranks; by default nobody does.

    Attributes:
        failed: Publishes this rank's error to all ranks. Collective: none.
        waiting: Registers a wait by what is waited for, so that a stall is explained and a deadlock proven.
        asked_to_stop: Whether this rank was asked to stop; read once a batch, sent with its gradients.
        stopped: All ranks know that one of them was asked to stop.
        connecting: Around the making of process groups: what was connected in it can be cut later, so that
            nothing waits in it for ever.
    """

    failed: Callable[[BaseException], None] = _ignore
    waiting: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
    asked_to_stop: Callable[[], bool] = bool
    stopped: Callable[[], None] = _ignore
    connecting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def bounded_wait(works: Sequence[Any]) -> bool:
    """Wait until all collectives are done, ``GIVE_UP_S`` at most; return whether they are. Never raises."""
    looks = [getattr(work, "is_completed", lambda: True) for work in works]
    return poll_until(lambda: all(look() for look in looks), GIVE_UP_S)


def raise_if_failed(means: Sequence[float], rank: int, world_size: int, what: str) -> None:
    """Raise if a rank reported in a reduced control block that its backward had failed. Local.

    Args:
        means: The block's values.
        rank: This rank.
        world_size: How many ranks there are.
        what: Which reduction, for the message.

    Raises:
        RankFailedError: Names the rank, where one alone has failed.
    """
    if means[Control.ERROR] <= 0:
        return
    count = round(means[Control.ERROR] * world_size)
    failed = round(means[Control.FAILED_RANK] * world_size) - 1 if count == 1 else -1
    who = f"rank {failed}" if count == 1 else f"{count} ranks"
    raise RankFailedError(
        f"[rank {rank}] {who} failed in the backward of {what}. This rank stops with it: a step without one"
        " rank's gradients would be another step. The failing rank prints its own error.",
        rank=failed,
    )


def raise_late(
    local: list[str], group: ReplicaGroup, layout: Layout, slots: Sequence[Slot]
) -> None:
    """Say on every rank whose second gradients came too late; send these last from now on.

    Args:
        local: Names of parameters, on this rank.
        group: Who takes part.
        layout: The buckets.
        slots: All parameters.

    Raises:
        LateGradientError: Always.

    Collective: every rank, once all know of it. Blocks.
    """
    names, ranks = gather_names(group, local)
    layout.defer(names, slots)
    raise LateGradientError(
        f"[rank {group.rank}] a second gradient of {some_names(names)} arrived after the first had"
        " been sent, so this step's average would miss it. These parameters are used in several"
        " re-entrant backwards (activation checkpointing with use_reentrant=True, or a backward"
        " inside a backward) for the first time now. They are sent last from the next step on; to"
        f" have that from the start, pass deferred={names[:5]!r} to LeanDDPStrategy.",
        names=names,
        ranks=ranks,
    )


def gather_names(group: ReplicaGroup, names: list[str]) -> tuple[list[str], list[int]]:
    """Return all ranks' names, each once, and the ranks that have some. Collective: every rank. Blocks."""
    by_rank: list[list[str]] = group.all_gather_object(names)
    ranks = [rank for rank, theirs in enumerate(by_rank) if theirs]
    return list(dict.fromkeys(name for theirs in by_rank for name in theirs)), ranks
