"""Run commands as a user would, in their own process group, with nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hydra.core.plugins import Plugins

from lightning_dp.app import cli
from tests.support import programs

ROOT = programs.ROOT
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Done:
    """What a command said and how it ended."""

    code: int
    output: str


def call(*command: str | Path, cwd: Path, timeout_s: float = 120.0, **environment: str) -> Done:
    """Run ``command`` in ``cwd``; everything that it started ends with it.

    Raises:
        AssertionError: It had not ended after ``timeout_s`` seconds.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "LEAN_DDP_", "PYTEST_"))}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{env['PATH']}"}
    paths = [str(programs.SOONER), env.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} had not ended after {timeout_s} s:\n{output}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Done(process.returncode, output)


def succeed(*command: str | Path, cwd: Path, **kwargs: str) -> str:
    """As :func:`call`; the command has to end well."""
    done = call(*command, cwd=cwd, **kwargs)
    assert done.code == 0, f"{command} ended with {done.code}:\n{done.output}"
    return done.output


def forked(folder: Path, *argv: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Run ``lean-ddp argv`` in a fork, where nothing has to be imported again.

    Returns:
        Exit code and everything that was printed.

    Raises:
        AssertionError: It had not ended after ``timeout_s`` seconds.
    """
    for module in ("mistakes", "report", "settings"):
        import_module(f"lightning_dp.app.{module}")
    Plugins.instance()  # found once, not in each fork
    sys.stdout.flush()
    sys.stderr.flush()
    printed = folder / "printed"
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            gc.freeze()  # as in run_ranks
            file = os.open(printed, os.O_CREAT | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.chdir(folder)
            sys.argv = sys.orig_argv = ["lean-ddp", *argv]
            code = cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), printed.read_text()
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"lean-ddp {argv} had not ended after {timeout_s} s")
        time.sleep(0.02)
