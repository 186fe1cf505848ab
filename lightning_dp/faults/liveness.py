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
        return cls(os.getpid(), _stat(os.getpid())[1], _machine())

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
        except OSError as error:
            return isinstance(error, PermissionError)
        return True


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process (SIGKILL) when its parent ends.

    Where the system cannot do it (anything but Linux), :func:`parent_has_gone` is left.

    Args:
        parent_pid: The expected parent. If it has gone already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent_has_gone(parent_pid):  # it ended before the request was made
            os._exit(1)


def parent_has_gone(parent_pid: int) -> bool:
    """Whether the process was given to another parent."""
    return os.getppid() != parent_pid


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of ``pid``; ("", -1) without such a process, or without Linux's /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return "", -1
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return fields[0], int(fields[19])


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or a /proc that is closed
        return socket.gethostname()
