"""The processes that rank 0 of a machine starts for the other ranks there.

[Note: no orphans] A child asks the kernel to be ended with its parent. It must ask before Python has
imported anything, or a parent that dies in the first seconds leaves it behind; so a few lines run first
and become the program. ``preexec_fn`` would run Python between fork and exec, which can deadlock in a
process with threads. The request is bound to the *thread* that starts the child, so only the main thread
makes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from lightning_dp.engine.waiting import poll_until
from lightning_dp.launch.environment import PARENT_VARIABLE, PID_VARIABLE

log = logging.getLogger(__name__)

_NOTE_AFTER_S = 30.0

_BECOME = (
    "import ctypes, os, sys\n"
    "parent = int(sys.argv[1])\n"
    "try:\n"
    "    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "except Exception:\n"
    "    pass\n"
    "if os.getppid() != parent:\n"
    "    os._exit(1)\n"
    f"os.environ['{PID_VARIABLE}'] = str(os.getpid())\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


class Children:
    """The other ranks of this machine."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.pid = os.getpid()

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """In order of rank."""
        return [self._processes[rank] for rank in sorted(self._processes)]

    def start(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], cwd: str | None
    ) -> None:
        """Start ``rank``; it ends with this process."""
        full = {**env, PARENT_VARIABLE: str(self.pid)}
        wrapped = list(command)
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            wrapped = [sys.executable, "-I", "-S", "-c", _BECOME, str(self.pid), *command]
        self._processes[rank] = subprocess.Popen(wrapped, env=full, cwd=cwd)

    def ended(self) -> dict[int, int]:
        """Return codes, by rank, of those that have ended."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def running(self) -> list[int]:
        """Ranks that have not ended."""
        ended = self.ended()
        return [rank for rank in sorted(self._processes) if rank not in ended]

    def send(self, signum: int) -> None:
        """Send a signal to all that run."""
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                self._processes[rank].send_signal(signum)

    def wait(self, limit_s: float) -> None:
        """Wait until all have ended; after 30 s it is said who is waited for.

        Args:
            limit_s: Seconds after which those left are ended with SIGKILL; ``math.inf`` for no limit.

        Raises:
            KeyboardInterrupt: Ctrl+C; those left have been ended.
        """
        try:
            if not self._have_ended(min(limit_s, _NOTE_AFTER_S)) and limit_s > _NOTE_AFTER_S:
                log.warning("lean_ddp: waiting for rank(s) %s to end.", _names(self.running()))
                self._have_ended(limit_s - _NOTE_AFTER_S)
            if limit_s > 0 and (running := self.running()):
                log.warning("lean_ddp: rank(s) %s did not stop: ending them.", _names(running))
        finally:  # also after Ctrl+C: whoever waits for them no longer wants them
            self.send(signal.SIGKILL)
            for process in self.processes:
                process.wait()

    def _have_ended(self, timeout_s: float) -> bool:
        return poll_until(lambda: not self.running(), timeout_s, longest_pause_s=0.02)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
