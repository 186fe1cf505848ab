"""Whether a process of this machine still lives, and how a child ends with its parent."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """Enough to tell a process from a later one with the same number.

    Attributes:
        pid: Its number.
        started: Start time in clock ticks since boot; -1 where the system does not say.
        machine: Names the machine and, on Linux, the namespace in which ``pid`` counts.
    """

    pid: int
    started: int
    machine: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """The calling process."""
        return cls(os.getpid(), _start_time(os.getpid()), _machine())

    def is_local(self) -> bool:
        """Whether the process counts in the same namespace on the same machine as the caller."""
        return self.machine == _machine()

    def is_alive(self) -> bool:
        """Whether the process still runs; a zombie does not. Only meaningful when :meth:`is_local`."""
        if sys.platform == "linux":
            state, started = _stat(self.pid)
            return state not in ("", "Z", "X") and (self.started < 0 or started == self.started)
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def die_with_parent(parent_pid: int) -> bool:
    """Ask the kernel to end this process (SIGKILL) when its parent ends.

    Args:
        parent_pid: The expected parent. If it has gone already, this process ends at once.

    Returns:
        False where the system cannot do it (anything but Linux); :func:`parent_has_gone` is left then.
    """
    if sys.platform != "linux":
        return False
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if parent_has_gone(parent_pid):  # it ended before the request was made
        os._exit(1)
    return True


def parent_has_gone(parent_pid: int) -> bool:
    """Whether the process was given to another parent."""
    return os.getppid() != parent_pid


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of ``pid`` from /proc; ("", -1) when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return "", -1
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return fields[0], int(fields[19])


def _start_time(pid: int) -> int:
    return _stat(pid)[1] if sys.platform == "linux" else -1


def _machine() -> str:
    if sys.platform != "linux":
        return socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
