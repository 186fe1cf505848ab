"""``lean-ddp smoke``: really start ranks, and see that each part of a training run works here.

Start, all-reduce, one accumulated step, a request to stop on one rank, resuming, a clean end. Every
number is compared with its known value. Takes some 20 seconds, most of it imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_dp.app.findings import Finding, exit_code, show
from lightning_dp.app.parsing import positive
from lightning_dp.launch.environment import PARENT_VARIABLE, PID_VARIABLE, RANK_VARIABLES

STEPS = ("start", "all-reduce", "accumulation", "preemption", "resume")
_CAUSES = (re.compile(r"failed first|failed after training"), re.compile(r"Error: "))
_SETTLE_S = 3.0


def main(arguments: Sequence[str]) -> int:
    """Run the smoke test and print a line for each part.

    Args:
        arguments: After ``lean-ddp smoke``.

    Returns:
        0 if all of it works, else 1.
    """
    options = parser().parse_args(list(arguments))
    with tempfile.TemporaryDirectory(prefix="lean-ddp-smoke-") as folder:
        findings = smoke(Path(folder), options.ranks, options.backend, options.seconds)
    show(findings, title=f"lean-ddp smoke: {options.ranks} ranks", as_json=options.json)
    return exit_code(findings)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(prog="lean-ddp smoke", description=__doc__)
    made.add_argument(
        "-n", "--ranks", type=positive, default=2, help="how many ranks (default: %(default)s)"
    )
    made.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        default="gloo",
        help="gloo for CPUs, nccl for one GPU a rank (default: %(default)s)",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="end everything after so many seconds (default: %(default)g)",
    )
    made.add_argument(
        "--json", action="store_true", help="print a list of findings as JSON (default: lines)"
    )
    return made


def smoke(folder: Path, ranks: int, backend: str, limit_s: float) -> list[Finding]:
    """Run the ranks; return one finding for each part.

    Args:
        folder: Empty; for checkpoints and reports.
        ranks: How many.
        backend: "gloo" or "nccl".
        limit_s: Seconds after which everything is ended.
    """
    log = folder / "output.log"
    command = [sys.executable, "-m", "lightning_dp.app.smoke_run", str(folder), str(ranks), backend]
    inherited = (*RANK_VARIABLES, PARENT_VARIABLE, PID_VARIABLE)
    env = {name: value for name, value in os.environ.items() if name not in inherited}
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - begin
    left = _end_group(process)
    findings = [_judge(step, folder, ranks) for step in STEPS]
    for index, finding in enumerate(findings):
        if finding.level == "FAIL":  # what follows was not reached, or cannot be trusted
            findings = findings[: index + 1]
            break
    findings.append(_judge_end(code, seconds, limit_s, left=left, cause=_cause(log)))
    return findings


def _judge(step: str, folder: Path, ranks: int) -> Finding:
    """Whether every rank has done ``step`` with the right result."""
    seconds = 0.0
    for rank in range(ranks):
        file = folder / f"rank{rank}.jsonl"
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        told = [line for line in lines if line[0] == step]
        if not told:
            return Finding("FAIL", f"{step}: rank {rank} has not done it")
        _, value, expected, after_s = told[-1]
        if abs(value - expected) > 1e-5 * max(1.0, abs(expected)):
            return Finding("FAIL", f"{step}: rank {rank} got {value:g}, and {expected:g} is right")
        seconds = max(seconds, after_s)
    return Finding("ok", f"{step}: {ranks} rank(s), after {seconds:.1f} s")


def _judge_end(
    code: int | None, seconds: float, limit_s: float, *, left: bool, cause: str
) -> Finding:
    if code is None:
        return Finding("FAIL", f"end: not over after {limit_s:.0f} s", "try --seconds 300")
    if code != 0:
        return Finding("FAIL", f"end: exit code {code} after {seconds:.1f} s: {cause}")
    if left:
        return Finding("FAIL", "end: a process was left behind")
    return Finding("ok", f"end: exit code 0, nobody left behind, {seconds:.1f} s in all")


def _end_group(process: subprocess.Popen[bytes]) -> bool:
    """End what is left of the run; return whether anything was."""
    deadline = time.monotonic() + (_SETTLE_S if process.poll() is not None else 0.0)
    left = True
    while left:
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            left = False
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return left


def _cause(log: Path) -> str:
    """The line of the output that says why."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    causes = [line for cause in _CAUSES for line in lines if cause.search(line)]
    return causes[0][-300:] if causes else (lines[-1][-300:] if lines else "no output")
