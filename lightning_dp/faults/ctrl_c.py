"""Ctrl+C reaches the thread that trains, whatever that thread is doing.

[Note: a lost wake-up] The system's signal handler only notes that SIGINT came; Python raises
``KeyboardInterrupt`` when the main thread next looks. A signal that comes after its last look and before a
system call (or that the system gave to another thread) wakes nobody: a ``time.sleep(60)`` sleeps on, and
nothing is interrupted for a minute. Python writes a byte into the wake-up descriptor in the system's
handler already, so the watching thread reads that and wakes the main thread with SIGURG, which ends its
system call. The main thread then looks, and goes on if there was nothing to see.

[Note: two more ways to lose it] ``KeyboardInterrupt`` raised in a destructor or a weak reference's callback
is printed and dropped; it is sent once more. And a call that never looks (a collective that waits in C++)
can hold it back for good; then the watching thread ends this rank as it would for another rank's failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WAKE_UPS = 2  # one more than needed: the first can be lost in the same way
_open: weakref.WeakSet[CtrlC] = weakref.WeakSet()


class CtrlC:
    """What became of SIGINT in the main thread; does nothing in a program that handles SIGINT itself."""

    def __init__(self) -> None:
        self._ours = self._watching = False
        self._pipe: tuple[int, int] | None = None
        self._lock = (
            threading.Lock()
        )  # the descriptor must not be closed and used again while it is read
        self._thread_id = 0
        self._wake_ups = 0
        self._again = False
        self._looked_at = 0.0
        self._raised_at = 0.0
        self._stuck_since: float | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around what the main thread does; nothing in another thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._thread_id = threading.get_ident()
        self._stuck_since, self._wake_ups, self._again = None, 0, False
        self._watching = True
        self._looked_at = time.monotonic()
        unraisable = sys.unraisablehook
        hook = self._unraisable_hook(unraisable)
        sys.unraisablehook = hook
        self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._raise)
        self._listen()
        try:
            yield
        finally:
            self._watching = False
            self._stop_listening()
            if self._ours and signal.getsignal(signal.SIGINT) == self._raise:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if sys.unraisablehook is hook:
                sys.unraisablehook = unraisable

    def look(self) -> None:
        """Wake the main thread if a signal came; called now and then by the watching thread."""
        if not self._watching:
            return
        now = time.monotonic()
        with self._lock:
            came = self._read()
        if came - {signal.SIGURG}:
            self._wake_ups = _WAKE_UPS
        if signal.SIGINT in came and self._ours and self._raised_at < self._looked_at:
            self._stuck_since = now
        self._looked_at = now
        again, self._again = self._again, False
        with contextlib.suppress(ProcessLookupError):
            if self._wake_ups:
                self._wake_ups -= 1
                signal.pthread_kill(self._thread_id, signal.SIGURG)
            if again:
                signal.pthread_kill(self._thread_id, signal.SIGINT)

    def is_stuck(self, grace_s: float) -> bool:
        """Whether SIGINT came more than ``grace_s`` seconds ago, and the main thread never looked."""
        since = self._stuck_since
        return since is not None and time.monotonic() - since > grace_s

    def __reduce__(self) -> tuple[type[CtrlC], tuple[()]]:
        """A spawned rank begins anew."""
        return CtrlC, ()

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        self._raised_at = time.monotonic()
        self._stuck_since = None
        raise KeyboardInterrupt

    def _unraisable_hook(self, previous: Any) -> Any:
        def hook(what: Any) -> None:
            if issubclass(what.exc_type, KeyboardInterrupt) and os.getpid() == pid:
                self._again = True
            previous(what)

        pid = os.getpid()
        return hook

    # The wake-up descriptor

    def _listen(self) -> None:
        """Take the wake-up descriptor, unless the program (asyncio) uses it."""
        if not hasattr(signal, "SIGURG"):
            return
        pipe = os.pipe()
        for fd in pipe:
            os.set_blocking(fd, False)
        before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            _close(pipe)
            return
        self._pipe = pipe
        _open.add(self)

    def _stop_listening(self) -> None:
        _open.discard(self)
        with self._lock:
            pipe, self._pipe = self._pipe, None
            if pipe is None:
                return
            now = signal.set_wakeup_fd(-1)
            if now not in (-1, pipe[1]):  # somebody else took it meanwhile
                signal.set_wakeup_fd(now)
            _close(pipe)

    def _read(self) -> set[int]:
        pipe = self._pipe
        if pipe is None:
            return set()
        try:
            return set(os.read(pipe[0], 4096))
        except BlockingIOError:
            return set()

    def let_go(self) -> None:
        """In a forked process: its signals are no business of its parent's."""
        pipe, self._pipe = self._pipe, None
        self._watching = False
        if pipe is not None:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
            _close(pipe)


def _close(pipe: tuple[int, int]) -> None:
    for fd in pipe:
        os.close(fd)


def _after_fork() -> None:
    for each in list(_open):
        each.let_go()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
