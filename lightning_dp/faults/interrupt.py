"""Raise an exception in the thread that trains, from another thread.

[Note: which signal] SIGURG is ignored by default, so that one that comes too late ends no process; nobody
else uses it for control; and unlike an exception set from outside it ends a ``time.sleep``.
Source: the Go runtime preempts its threads with SIGURG for the same reasons (proposal 24543).
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lightning_dp.faults.ctrl_c import CtrlC


class Interrupter:
    """Delivers one exception into the thread that called :meth:`armed`.

    In the main thread a signal is used. A trainer that runs in another thread is interrupted between two
    bytecodes, which cannot end a blocking call.

    Attributes:
        ctrl_c: What became of Ctrl+C.
    """

    def __init__(self) -> None:
        self.ctrl_c = CtrlC()
        self._thread_id = 0
        self._in_main = False
        self._armed = False
        self._pending: Callable[[], BaseException] | None = None

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Accept interrupts of the calling thread inside the ``with`` block."""
        self._thread_id = threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()
        previous: Any = None
        if self._in_main and hasattr(signal, "SIGURG"):
            previous = signal.signal(signal.SIGURG, self._handle)
        self._armed = True
        try:
            with self.ctrl_c.watched():
                yield
        finally:
            self.disarm()
            if self._in_main and hasattr(signal, "SIGURG"):
                signal.signal(signal.SIGURG, previous if previous is not None else signal.SIG_DFL)

    def disarm(self) -> None:
        """Accept no further interrupt: the thread is on its way out already."""
        self._armed = False

    def fire(self, make_error: Callable[[], BaseException]) -> None:
        """Raise ``make_error()`` in the armed thread as soon as it runs Python code; may be repeated."""
        if not self._armed:
            return
        self._pending = make_error
        if self._in_main and hasattr(signal, "SIGURG"):
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._thread_id, signal.SIGURG)
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread_id), ctypes.py_object(_class_of(make_error()))
        )

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        make_error, self._pending = self._pending, None
        if self._armed and make_error is not None:
            raise make_error()


def _class_of(error: BaseException) -> type[BaseException]:
    """A class that the interpreter calls without arguments, and whose instance is like ``error``.

    It is shown and pickled as ``error``: whoever starts ranks may send it to another process.
    """

    def init(self: BaseException) -> None:
        self.args = error.args
        self.__dict__.update(error.__dict__)

    kind = type(error)
    own = {"__init__": init, "__reduce__": lambda self: error.__reduce__()}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **own})
