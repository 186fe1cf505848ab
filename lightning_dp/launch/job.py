"""What belongs to a process rather than to a Trainer: its children, its store, its environment.

[Note: one job at a time] Several Trainers of one program, or ``fit`` and ``test`` of one Trainer, use
the same ranks. The jobs of a Hydra sweep run one after the other in one process, and each must have fresh
ranks, or a rank that failed in one job would meet the others in the next. So a job ends with its job:
the group is taken down, the ranks have ended, and the environment is as it was before.

The running job is a global of this module, because child processes, ``os.environ`` and the default
process group are global to a process, whoever starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator

import torch.distributed as dist

from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import LaunchError
from lightning_dp.faults.liveness import ProcessIdentity
from lightning_dp.faults.peers import exit_error
from lightning_dp.faults.store import Store
from lightning_dp.launch import exit_code
from lightning_dp.launch.children import Children
from lightning_dp.launch.environment import remember_variables
from lightning_dp.launch.stores import RankStore

log = logging.getLogger(__name__)

_FAREWELL_S = 3.0


class Job:
    """One job of this process.

    Args:
        key: Names the job.
        grace_s: Seconds that the other ranks get to end after a failure.

    Attributes:
        children: Ranks that this process started.
        hosted: Where the ranks meet; None before the first rendezvous.
        first_process: Rank 0's, once it was met.
        ends_with_job: Whether somebody will end it when its Hydra job ends.
        failed: Whether a trainer call of the job has failed.
        dead_ranks: How many ranks are known to have died without a word.
        preempted: Whether all ranks were asked to stop, and did.
    """

    def __init__(self, key: str, grace_s: float) -> None:
        self.key = key
        self.grace_s = grace_s
        self.children = Children()
        self.hosted: RankStore | None = None
        self.first_process: ProcessIdentity | None = None
        self.ends_with_job = False
        self.failed = False
        self.dead_ranks = 0
        self.preempted = False
        self.rank = 0
        self.world_size = 1
        self._pid = os.getpid()
        self._put_variables_back = remember_variables()

    def check_peers(self) -> None:
        """Raise if a rank that is about to be met has ended already.

        Raises:
            RankFailedError: A child has ended.
            LaunchError: The program of rank 0 is over.
        """
        for rank, code in self.children.ended().items():
            raise exit_error(rank, code, "first", f"[lean_ddp rank {self.rank}/{self.world_size}]")
        if self.hosted is None or self.rank == 0 or self.first_process is None:
            return
        if self.hosted.store.check([_exiting(self.first_process)]):
            raise LaunchError(
                f"[lean_ddp rank {self.rank}/{self.world_size}] the program of rank 0 is over, but this "
                "rank has called the trainer once more. Fix: call fit, validate, test and predict on "
                "every rank, not inside 'if rank == 0'."
            )

    def end(self, failed: bool = False) -> BaseException | None:
        """Take the job down: the group, the other ranks, the environment.

        Args:
            failed: The job has failed, so ranks that do not end are ended.

        Returns:
            The failure of another rank, if this one knew of none.

        Collective: none; every rank ends its own.
        """
        failed = failed or self.failed
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        error = self._reap(failed)
        self.hosted = None
        self._put_variables_back()
        return None if failed else error

    @contextlib.contextmanager
    def unfinished(
        self, is_agreed: Callable[[BaseException], bool] = lambda error: False
    ) -> Iterator[None]:
        """Failed until the ``with`` block has ended well, or with an exception that ``is_agreed``.

        Nothing that arrives at an awkward moment (a second Ctrl+C inside the handling of the first) can
        then leave a job that waits without a limit for ranks that nobody told.
        """
        before, self.failed = self.failed, True
        try:
            yield
        except BaseException as error:
            if is_agreed(error):
                self.failed = before
            raise
        self.failed = before

    def end_children(self, know_why: bool) -> None:
        """End the ranks started here: at once, or with time to leave if they know why.

        Collective: none. Returns within 3 ``grace_s``.
        """
        self.failed = True
        self.children.wait(3 * self.grace_s if know_why else 0.0)

    def _reap(self, failed: bool) -> BaseException | None:
        self.children.wait(3 * self.grace_s if failed else math.inf)
        good = (0, exit_code.PREEMPTED, -signal.SIGTERM) if self.preempted else (0,)
        for rank, code in self.children.ended().items():
            if code not in good:
                return exit_error(rank, code, "after training")
        return None

    def at_exit(self) -> None:
        """The program ends: say so, let the others finish, leave nobody behind."""
        if os.getpid() != self._pid:  # a forked worker inherits this handler, not the job
            return
        crashed = getattr(sys, "last_value", None) is not None
        hosted = self.hosted
        with contextlib.suppress(dist.DistError, RuntimeError):
            if hosted is not None:
                hosted.store.set(_exiting(ProcessIdentity.of_this_process()), "1")
                hosted.store.add("gone", 1)
        try:
            error = self._reap(self.failed or crashed)
        except KeyboardInterrupt:  # those that were waited for have been ended
            exit_code.remember(1)
            return
        if error is not None and not self.failed:
            log.error("%s", error)
            exit_code.remember(getattr(error, "exit_code", 1))
        if hosted is not None and hosted.is_hosted_here and not self.children.processes:
            _wait_for_farewells(hosted.store, self.world_size - self.dead_ranks)


def _exiting(process: ProcessIdentity) -> str:
    """The key that says so; torchrun's store still holds those of earlier attempts."""
    return f"exiting/{process.pid}-{process.started}"


def _wait_for_farewells(store: Store, world_size: int) -> None:
    """The host of the store leaves last, so that the others can still read what happened."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        poll_until(lambda: store.add("gone", 0) >= world_size, _FAREWELL_S)


_current: Job | None = None
_spent: set[str] = set()


def current() -> Job | None:
    """The job of this process, if one was begun."""
    return _current if _current is not None and _current._pid == os.getpid() else None


def begin(key: str, grace_s: float) -> Job:
    """The job ``key``: the running one, or a new one after an earlier job's has ended.

    Raises:
        LaunchError: The ranks of this very job have ended already.
    """
    global _current
    job = current()
    if job is not None and job.key == key:
        return job
    if job is not None:
        end(failed=False)
    if key in _spent:
        raise LaunchError(
            "[lean_ddp] the ranks of this program have ended, and they cannot be started a second time in "
            "the middle of it. Fix: start the program anew; in a sweep, let the error end the job."
        )
    exit_code.arm()
    job = _current = Job(key, grace_s)
    atexit.register(job.at_exit)
    return job


def end(failed: bool) -> BaseException | None:
    """End the job of this process, if there is one; see :meth:`Job.end`."""
    global _current
    job = current()
    if job is None:
        return None
    atexit.unregister(job.at_exit)
    _current = None
    _spent.add(job.key)
    return job.end(failed)
