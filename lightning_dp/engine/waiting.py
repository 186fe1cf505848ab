"""Wait for a collective so that the wait can be interrupted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

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
