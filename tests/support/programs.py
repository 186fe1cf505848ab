"""Run real programs with several ranks, and see that nothing of them is left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOONER = ROOT / "tests" / "support" / "sooner"  # in PYTHONPATH: a program starts in half the time
MARK = "LEAN_DDP_TEST_RUN"  # an environment variable that every process of a run inherits


def free_port() -> int:
    """A port that was free a moment ago, below those that systems give to whoever connects meanwhile."""
    draw = random.SystemRandom()  # another one in each test process, whatever was seeded
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", draw.randrange(10_000, 32_000)))
            return int(sock.getsockname()[1])


@dataclasses.dataclass
class Finished:
    """A program that has ended. ``left`` lists processes of it that were still there ``settle_s`` later."""

    code: int
    out: str
    seconds: float
    left: list[int]


class Program:
    """A running program; ends with everything that it started."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> None:
        self.token = f"{os.getpid()}-{time.monotonic_ns()}"
        self.log = Path(cwd) / f"output-{self.token}.log"
        clean = {
            k: v
            for k, v in os.environ.items()
            if k
            not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
            and not k.startswith(("SLURM_", "TORCHELASTIC_", "LEAN_DDP_"))
        }
        full = {
            **clean,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: self.token,
            **(env or {}),
        }
        paths = [str(SOONER), str(ROOT), full.get("PYTHONPATH", "")]
        full["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.begin = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(argv),
                cwd=cwd,
                env=full,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if stdin is not None:
            assert self.process.stdin is not None
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()

    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Return when ``text`` was printed."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not printed:\n{self.output()}")
            time.sleep(0.05)

    def finish(self, timeout_s: float = 120.0, settle_s: float = 5.0) -> Finished:
        """Wait for the end; look for processes that stayed behind."""
        try:
            code = self.process.wait(max(0.1, self.begin + timeout_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not finished after {timeout_s} s:\n{self.output()}") from None
        seconds = time.monotonic() - self.begin
        deadline = time.monotonic() + settle_s
        while (left := processes_of(self.token)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        return Finished(code, self.output(), seconds, left)

    def kill(self) -> None:
        """End everything that carries this program's mark."""
        for pid in {self.process.pid, *processes_of(self.token)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def processes_of(token: str) -> list[int]:
    """Living processes that inherited ``token`` (Linux)."""
    wanted = f"{MARK}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if alive and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def run_program(argv: Sequence[str], *, cwd: Path, timeout_s: float = 120.0, **kwargs) -> Finished:
    """Run a program to its end."""
    return Program(argv, cwd=cwd, **kwargs).finish(timeout_s)


def python(*args: str) -> list[str]:
    """A command line for this interpreter."""
    return [sys.executable, *args]
