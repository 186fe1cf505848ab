"""``lean-ddp smoke``: really start ranks, and see that each part of a training run works here.

Start, all-reduce, one accumulated step, a request to stop on one rank, resuming, an optimizer's state in
shares, a clean end. Every number is compared with its known value. Takes some 20 seconds, most of it
imports.
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

from lightning_dp.app.findings import Finding, add_json_option, report
from lightning_dp.app.parsing import add_options, positive
from lightning_dp.launch.environment import INHERITED

STEPS = ("start", "all-reduce", "accumulation", "preemption", "resume", "zero")
_CAUSES = (r"failed first|failed after training", r"Error: ")
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
        backend = "nccl" if options.accelerator == "gpu" else options.backend
        findings = smoke(Path(folder), options.ranks, backend, options.seconds)
    return report(findings, as_json=options.json)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(prog="lean-ddp smoke", description=__doc__)
    add_options(
        made,
        ("-n --ranks", positive, 2, "how many ranks"),
        ("--backend", ("gloo", "nccl"), "gloo", "gloo for CPUs, nccl for one GPU a rank"),
        ("--accelerator", ("cpu", "gpu"), "cpu", "gpu: one GPU a rank, over nccl"),
        ("--seconds", float, 120, "end everything after so many seconds"),
    )
    add_json_option(made)
    return made


def smoke(folder: Path, ranks: int, backend: str, limit_s: float) -> list[Finding]:
    """Run the ranks; return one finding for each part up to the first that failed, and for the end.

    Args:
        folder: Empty; for checkpoints and reports.
        ranks: How many.
        backend: "gloo" or "nccl".
        limit_s: Seconds after which everything is ended.
    """
    log = folder / "output.log"
    command = [sys.executable, "-m", "lightning_dp.app.smoke_run", str(folder), str(ranks), backend]
    env = {name: value for name, value in os.environ.items() if name not in INHERITED}
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(limit_s)
    seconds = time.monotonic() - begin
    left = _end_group(process, 0.0 if code is None else _SETTLE_S)
    findings = []
    for step in STEPS:
        findings.append(_judge(step, folder, ranks))
        if findings[-1].level == "FAIL":  # what follows was not reached, or cannot be trusted
            break
    if code is None:
        end = Finding("FAIL", f"end: not over after {limit_s:.0f} s", "try --seconds 300")
    elif code:
        end = Finding("FAIL", f"end: exit code {code} after {seconds:.1f} s: {_cause(log)}")
    elif left:
        end = Finding("FAIL", "end: a process was left behind")
    else:
        end = Finding("ok", f"end: exit code 0, nobody left behind, {seconds:.1f} s in all")
    return [*findings, end]


def _judge(step: str, folder: Path, ranks: int) -> Finding:
    """Whether every rank has told of ``step``, and what."""
    slowest_s = 0.0
    for rank in range(ranks):
        file = folder / f"rank{rank}.{step}.json"
        if not file.exists():
            return Finding("FAIL", f"{step}: rank {rank} has not done it")
        wrong, after_s = json.loads(file.read_text())
        if wrong:
            return Finding("FAIL", f"{step}: rank {rank} {wrong}")
        slowest_s = max(slowest_s, after_s)
    return Finding("ok", f"{step}: {ranks} rank(s), after {slowest_s:.1f} s")


def _end_group(process: subprocess.Popen[bytes], settle_s: float) -> bool:
    """End what is left of the run after ``settle_s`` seconds; return whether anything was."""
    deadline = time.monotonic() + settle_s
    try:
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    process.wait()
    return True


def _cause(log: Path) -> str:
    """The line of the output that says why: the last, where none does better."""
    lines = log.read_text(errors="replace").splitlines()
    for cause in _CAUSES:
        if found := [line for line in lines if re.search(cause, line)]:
            return found[0].strip()[-300:]
    return lines[-1].strip()[-300:] if lines else "no output"
