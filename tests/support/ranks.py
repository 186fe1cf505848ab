"""Run a function on several forked ranks, with a timeout, and bring their results back.

Forking costs about 0.1 s a test; spawning costs seconds, most of it imports. A file store is used, so
that no test owns a port. The parent never initialises a process group, nor CUDA: a child is free to do so.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import grounds

LIMIT_S = 15.0  # within it a failure ends on all ranks, also where the machine is loaded
both_worlds = pytest.mark.parametrize("world_size", [2, 3])


class RankError(AssertionError):
    """One or more ranks failed. ``tracebacks`` maps a rank to its traceback."""

    def __init__(
        self, message: str, tracebacks: dict[int, str], exit_codes: dict[int, int]
    ) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks
        self.exit_codes = exit_codes


def _child(
    fn: Callable[..., Any], rank: int, world_size: int, folder: Path, args: tuple, init: bool
) -> None:
    code = 1
    try:
        gc.freeze()  # what the parent holds stays: looking at it would copy all of its memory
        os.setpgid(0, 0)  # so that the parent can end everything that this rank started
        torch.set_num_threads(1)
        ground = grounds.CURRENT
        os.environ.update(ground.environment(rank, world_size))
        if init:
            ground.enter(rank)  # a Trainer places its module by itself
            dist.init_process_group(
                ground.backend,
                store=dist.FileStore(str(folder / "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
        result = fn(rank, world_size, *args)
        torch.save(result, folder / f"result{rank}")
        code = 0
        if rank == 0:
            _let_others_leave(folder, world_size)
    except pytest.skip.Exception as reason:
        (folder / f"skip{rank}").write_text(str(reason))
        code = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no destructors: gloo's may wait for peers that are gone


def _let_others_leave(folder: Path, world_size: int) -> None:
    """Rank 0 may host the store of a Trainer's ranks; programs wait at their exit, which is skipped."""
    deadline = time.monotonic() + 2.0
    left: set[int] = set()
    while len(left) < world_size - 1 and time.monotonic() < deadline:
        left = {
            rank
            for rank in range(1, world_size)
            if any((folder / f"{what}{rank}").exists() for what in ("result", "skip", "error"))
        }
        time.sleep(0.002)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    init_process_group: bool = True,
    grace_s: float = 3.0,
    expect_failure: bool = False,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` forked ranks; return the results by rank.

    Ranks live on the test's ground (``grounds.CURRENT``). A rank may call ``pytest.skip``.

    Args:
        fn: Runs in each rank, with a group over all ranks as the default group.
        world_size: How many ranks.
        timeout_s: Seconds after which every rank is ended and the test fails.
        init_process_group: False leaves the group to ``fn`` (a Trainer makes its own).
        grace_s: Seconds that the other ranks get after the first failure before they are ended.
        expect_failure: Wait for all ranks to end by themselves even after a failure (up to the timeout),
            and return the tracebacks (or None) by rank in place of the results.

    Raises:
        RankError: A rank failed or the time ran out. Everything that was started has ended.
    """
    if reason := grounds.why_not(grounds.CURRENT.needs(world_size)):
        pytest.skip(f"not run: {reason}")
    with tempfile.TemporaryDirectory(prefix="ranks") as tmp:
        folder = Path(tmp)
        sys.stdout.flush()
        sys.stderr.flush()
        pids: dict[int, int] = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(fn, rank, world_size, folder, args, init_process_group)
            pids[rank] = pid
        exit_codes: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        timed_out = False
        while len(exit_codes) < world_size:
            for rank, pid in pids.items():
                if rank in exit_codes:
                    continue
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    exit_codes[rank] = os.waitstatus_to_exitcode(status)
                    if exit_codes[rank] != 0 and not expect_failure:
                        deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                timed_out = True
                break
            time.sleep(0.005)
        for pid in pids.values():
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        for rank, pid in pids.items():
            if rank not in exit_codes:
                os.waitpid(pid, 0)
                exit_codes[rank] = -int(signal.SIGKILL)
        tracebacks = {
            rank: (folder / f"error{rank}").read_text()
            for rank in range(world_size)
            if (folder / f"error{rank}").exists()
        }
        if expect_failure:
            if timed_out:
                raise RankError(f"timed out after {timeout_s} s", tracebacks, exit_codes)
            return [tracebacks.get(rank) for rank in range(world_size)]
        if any(exit_codes.values()):
            told = "\n".join(
                f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items())
            )
            why = f"timed out after {timeout_s} s; " if timed_out and not tracebacks else ""
            raise RankError(f"{why}exit codes by rank {exit_codes}\n{told}", tracebacks, exit_codes)
        for skipped in sorted(folder.glob("skip*")):
            pytest.skip(skipped.read_text())
        return [
            torch.load(folder / f"result{rank}", map_location="cpu", weights_only=False)
            for rank in range(world_size)
        ]
