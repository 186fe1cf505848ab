"""A rank leaves with an error: was it the first, and if not, what was?"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import RankFailedError
from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.record import (
    FailureRecord,
    add_note,
    first_line,
    is_consequence,
    say_briefly,
)
from lightning_dp.faults.waits import ADVICE
from lightning_dp.faults.watchdog import Watchdog

_GRACE_PERIOD_S = 1.5
_CAUSE_KNOWN_AFTER_S = 2.5  # a process that died without a word is noticed well within this


def find_root_cause(
    channel: FailureChannel,
    watchdog: Watchdog,
    error: BaseException,
    *,
    where: str,
    waited_for: str,
    grace_s: float,
) -> FailureRecord | None:
    """The failure that was first, after this rank has told its own.

    A lost connection has a cause on another rank, which is given ``grace_s`` to be told. If nobody tells
    one, the rank that does not answer any more is to blame: the other ranks' watching threads answer.

    Args:
        channel: For the thread that trains.
        watchdog: This rank's.
        error: With which this rank leaves.
        where: What it was doing.
        waited_for: The collective that it waited for last.
        grace_s: Seconds to wait for a cause.

    Returns:
        None where the store has gone and nobody knows why.

    Collective: none. Blocks for ``grace_s`` at most.
    """
    try:
        own = FailureRecord.from_exception(channel.rank, error, where)
        first = None
        if is_consequence(error):
            watchdog.hurry()
            ping = channel.ping()
            known_s = max(grace_s, _CAUSE_KNOWN_AFTER_S)
            first = poll_until(lambda: watchdog.first or channel.first(), known_s)
            if first is None:
                own = _blame(channel, ping, own, waited_for)
        if first is None:
            first = channel.publish(own)
        else:
            channel.write(f"error/{channel.rank}", own.to_json())
        if first.rank != channel.rank:
            channel.acknowledge()
        return first
    except dist.DistError:  # the store has gone, and the watchdog says with whom
        return poll_until(lambda: watchdog.first, max(grace_s, _CAUSE_KNOWN_AFTER_S))


def _blame(
    channel: FailureChannel, ping: str, own: FailureRecord, waited_for: str
) -> FailureRecord:
    """A connection was lost and nobody has told why."""
    silent = channel.unanswered(ping)
    if silent:
        lost = f"rank {channel.rank} lost its connection: {own.message[:200]}"
        return FailureRecord(silent[0], "it does not answer", lost, host="?", pid=-1)
    gone = channel.gone()
    if gone and waited_for:
        what = (
            f"rank {channel.rank} waits for {waited_for}, but rank(s) {gone} have left the trainer"
        )
        return FailureRecord(-1, "deadlock", f"{what}. {ADVICE}", host="the ranks", where=own.where)
    return own


def explain(
    first: FailureRecord | None, channel: FailureChannel, error: BaseException
) -> BaseException | None:
    """The error to raise in place of ``error``, if that is only a consequence; else a note on it.

    Where another rank of this machine prints what happened in full, one line is enough here, if the error
    ends the program. A rank that died without a word prints nothing, so rank 0 does.
    """
    if first is None or first.rank == channel.rank:
        return None
    who = f"[lean_ddp rank {channel.rank}/{channel.world_size}]"
    if first.is_interrupt and isinstance(error, KeyboardInterrupt):
        say_briefly(error, f"{who} {first.headline()}")
        return None
    if first.is_like(error):
        text = f"{type(error).__name__}: {first_line(first.message)}"
        say_briefly(error, f"{who} {text} (as on rank {first.rank}, which prints it in full)")
        return None
    if is_consequence(error):
        known = isinstance(error, RankFailedError) and bool(error.remote_traceback)
        replacement = None if known else first.to_error(channel.rank, channel.world_size)
        if first.is_of_this_machine() and (first.traceback or channel.rank != 0):
            shown = f" (rank {first.rank} prints its traceback)" if first.traceback else ""
            say_briefly(replacement or error, f"{who} {first_line(first.headline())}{shown}")
        return replacement
    add_note(error, f"lean_ddp: {first.headline()}")
    return None


def wait_until_read(channel: FailureChannel, first: FailureRecord | None) -> None:
    """The process that hosts the store stays until the others have read what happened."""
    dead = first.rank if first is not None and not first.traceback else -1
    with contextlib.suppress(dist.DistError, RuntimeError):
        poll_until(lambda: channel.all_acknowledged(without=dead), _GRACE_PERIOD_S)
