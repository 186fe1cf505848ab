"""Waits on the host that Python can interrupt: for a collective, and for anything that is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_SLICE = timedelta(milliseconds=200)
_TIMED_OUT = "operation timed out"


def interruptible_wait(work: Any, *, on_host: bool = True) -> None:
    """Wait for ``work`` on the host, in slices between which Python runs its signal handlers.

    For groups whose ``wait`` blocks the host (gloo): a plain ``wait`` there cannot be ended by anything but
    the collective itself, so a rank that must stop because another one failed would sit there until the
    group's timeout. Work that is done already costs the same as a plain ``wait``.

    Args:
        work: What an asynchronous collective returned.
        on_host: Whether the host waits at all; on CUDA only the stream does.

    Raises:
        RuntimeError: The collective itself failed.

    Collective: completes one that was issued on every rank. Blocks.
    """
    if not on_host or not isinstance(work, dist.Work):
        work.wait()
        return
    while True:
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            if _TIMED_OUT not in str(error).lower():
                raise
            if work.is_completed():
                # It ended just after the slice did. What it ended with is asked again: a group's own
                # timeout has the same words.
                work.wait()
                return
        else:
            return


def poll_until(look: Callable[[], T], timeout_s: float, *, longest_pause_s: float = 0.05) -> T:
    """Look again and again until there is something to see, or the time is up.

    Args:
        look: Returns something true to end the wait; what it raises ends it too.
        timeout_s: Seconds to wait; ``math.inf`` for no limit. It looks once at least.
        longest_pause_s: The pause between two looks grows up to this.

    Returns:
        What ``look`` returned last.

    Collective: none.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0005
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_pause_s)
    return seen
