"""A program ends with the code of the rank that failed first, and says once what happened.

Python ends with 1 after any exception. What a shell or a scheduler should see is the code of the rank whose
failure ended the run, when it is above 0: ``os._exit(3)`` on rank 1 makes the program end with 3.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from lightning_dp.faults.record import brief_of

PREEMPTED = 128 + 15  # SIGTERM, as shells count it

_state: dict[str, int] = {}


def arm() -> None:
    """Prepare; once per process. Must come before the handlers that should still run at the end."""
    if "armed" in _state:
        return
    _state["armed"] = 1
    atexit.register(_leave)
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        line = brief_of(error)
        if line:
            sys.stderr.write(f"{line}\n")
        else:
            previous(kind, error, traceback)
        code = code_of(error)
        if code > 1:  # with 1 Python ends by itself
            remember(code)

    sys.excepthook = hook


def code_of(error: BaseException | None) -> int:
    """The code that the error of another rank asks for, also if it was wrapped; 0 for any other."""
    while error is not None:
        code = getattr(error, "exit_code", None)
        if isinstance(code, int):
            return code
        error = error.__cause__
    return 0


def remember(code: int) -> None:
    """End this process with ``code``, if it is above 0, whatever Python would have done."""
    if code > 0:
        _state.setdefault("code", code)


def _leave() -> None:
    """The last of the handlers at exit: those registered later have run."""
    code = _state.get("code", 0)
    if code > 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
