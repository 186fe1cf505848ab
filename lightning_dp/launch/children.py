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
    """The other ranks of this machine.

    Attributes:
        processes: By rank.
    """

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], cwd: str | None
    ) -> None:
        """Start ``rank``; it ends with this process."""
        pid = str(os.getpid())
        wrapped = list(command)
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            wrapped = [sys.executable, "-I", "-S", "-c", _BECOME, pid, *command]
        self.processes[rank] = subprocess.Popen(wrapped, env={**env, PARENT_VARIABLE: pid}, cwd=cwd)

    def ended(self) -> dict[int, int]:
        """Return codes, by rank, of those that have ended."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def send(self, signum: int) -> None:
        """Send a signal to all that run."""
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                self.processes[rank].send_signal(signum)

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
            for process in self.processes.values():
                process.wait()

    def _have_ended(self, timeout_s: float) -> bool:
        return poll_until(lambda: not self.running(), timeout_s, longest_pause_s=0.02)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
