"""What a stack tells: the user's line in it, and the key that is being logged."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_NOT_THE_USERS = {
    *sys.stdlib_module_names,
    *("lightning", "lightning_dp", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    *("torch", "torchmetrics"),
}


def user_line(thread_id: int | None = None) -> str:
    """The innermost line of the user's program: "train.py:31 in validation_step"; empty if there is none.

    Args:
        thread_id: Of a thread; None for the caller's.
    """
    for frame in _stack(thread_id):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_USERS:
            code = frame.f_code
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
    return ""


def logged_name() -> str:
    """The key that ``self.log(..., sync_dist=True)`` is reducing now; empty outside of one.

    Lightning hands the strategy a value without its name, so this looks up the stack for the object that
    holds both. Without it reductions have no names in reports.
    """
    for frame in _stack():
        if frame.f_code.co_name in ("compute", "update"):
            meta = getattr(frame.f_locals.get("self"), "meta", None)
            if isinstance(name := getattr(meta, "name", None), str):
                return name
    return ""


def _stack(thread_id: int | None = None) -> Iterator[FrameType]:
    """Innermost first; the thread may run on meanwhile."""
    frame = sys._current_frames().get(thread_id or threading.get_ident())
    while frame is not None:
        yield frame
        frame = frame.f_back
