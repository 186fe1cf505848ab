"""The strategy's view of starting, meeting, failing and stopping."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_dp.engine.group import Waiting
from lightning_dp.engine.reduction.failure import Supervision
from lightning_dp.faults.store import Store, empty_store, with_prefix
from lightning_dp.internals import hydra as hydra_seams
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals.lightning import DDPStrategy
from lightning_dp.launch.environment import (
    PARENT_VARIABLE,
    Placement,
    check_group,
    compare_members,
)
from lightning_dp.launch.guarded_call import GuardedCall
from lightning_dp.launch.job import Job
from lightning_dp.launch.launcher import LeanScriptLauncher
from lightning_dp.launch.processes import LeanProcessLauncher
from lightning_dp.launch.rendezvous import Rendezvous, describe_this_rank, rendezvous
from lightning_dp.launch.stores import reach_store
from lightning_dp.launch.view import Engine
from lightning_dp.options import FaultOptions

T = TypeVar("T")


class RunController:
    """Follows the strategy from the launch to the end of each call of the trainer.

    Args:
        options: Checked options.
        engine: What is asked of the engine.
    """

    def __init__(self, options: FaultOptions, engine: Engine) -> None:
        self._call = GuardedCall(options, engine)
        self._guard = self._call.guard

    @property
    def failing(self) -> bool:
        """Whether this rank is on its way out with an error; nothing collective can succeed."""
        return self._guard.failing

    @property
    def waiting(self) -> Waiting:
        """Names a collective of all ranks, while this rank waits in it. See :meth:`Waits.waiting`."""
        return self._guard.waits.waiting

    @property
    def only_launches(self) -> bool:
        """Whether this process started the ranks of a failed run and is none itself."""
        return self._call.only_launches

    def make_launcher(self, strategy: Any, start_method: str) -> Any:
        """The launcher for ``strategy``."""
        if start_method == "popen":
            return LeanScriptLauncher(
                strategy.cluster_environment, strategy.num_processes, strategy.num_nodes, self._call
            )
        return LeanProcessLauncher(strategy, start_method, self._call)

    # The ranks meet

    def setup_distributed(self, strategy: DDPStrategy, default: Callable[[], None]) -> None:
        """Meet the other ranks, make the process group if there is none, begin to watch.

        Args:
            strategy: Whose ranks; a world of one meets nobody.
            default: What the strategy would do; finds the process group.

        Raises:
            LaunchError: Ranks are missing, or run another job.

        Collective: every rank. Blocks until all are there, for ``rendezvous_timeout_s`` at most.
        """
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        assert environment is not None
        if dist.is_initialized():
            place = Placement.of(environment, strategy.num_processes, strategy.num_nodes)
            check_group(place, dist.get_world_size())
        if strategy.world_size > 1:
            self._join(strategy, (environment.main_address, environment.main_port))
        elif not dist.is_initialized():
            self._make_group(strategy, empty_store(), 0, 1)  # needs no port
        default()

    def _join(self, strategy: DDPStrategy, address: tuple[str, int]) -> None:
        job = self._call.job or self._call.begin_job("program")
        job.rank, job.world_size = strategy.global_rank, strategy.world_size
        timeout_s = self._call.options.rendezvous_timeout_s
        hosted = job.hosted = job.hosted or reach_store(job.rank, address, timeout_s)
        hydra_job = hydra_seams.hydra_job()
        info = {**describe_this_rank(), "job": hydra_job.describe() if hydra_job else None}
        met = rendezvous(
            hosted.store,
            job.rank,
            job.world_size,
            info,
            timeout_s=timeout_s,
            check=job.check_peers,
        )
        job.first_process = met.processes[0]
        compare_members(met.members, job.rank)
        self._guard.sockets.spared_port = hosted.port
        if not dist.is_initialized():
            run_seams.one_device_is_alone()
            store = with_prefix("group", met.store)
            with self._guard.sockets.recording():
                self._make_group(strategy, store, job.rank, job.world_size)
        self._watch(job, met, outlives_ranks=hosted.outlives_ranks)

    @staticmethod
    def _make_group(strategy: DDPStrategy, store: Store, rank: int, world_size: int) -> None:
        """The default process group. Collective: every rank. Blocks."""
        device: torch.device = strategy.root_device
        dist.init_process_group(
            run_seams.process_group_backend(strategy),
            store=store,  # type: ignore[arg-type]
            rank=rank,
            world_size=world_size,
            timeout=run_seams.timeout_of(strategy),
            device_id=device if device.type != "cpu" else None,
        )

    def _watch(self, job: Job, met: Rendezvous, *, outlives_ranks: bool) -> None:
        parent = os.environ.get(PARENT_VARIABLE)
        self._guard.open(
            with_prefix("guard", met.store),
            job.rank,
            met.processes,
            thread_store=with_prefix("guard", met.store.clone()),
            children=job.children.ended,
            store_host=-1 if outlives_ranks else 0,
            parent_pid=int(parent) if parent else None,
            each_look=self._call.stop.share,
        )

    # While a call runs

    def while_waiting(self, what: str, call: Callable[[], T], alone: T) -> T:
        """Communicate through ``call``; where this rank is failing, do not, and return ``alone``.

        Args:
            what: Names it in reports; empty for one in which not all ranks take part.
            call: Communicates.
            alone: Returned instead.

        Collective: as ``call``'s.
        """
        if self._guard.failing:
            return alone
        if not what:
            return call()
        with self.waiting(what):
            return call()

    def barrier(self, name: str, plain: Callable[[], None]) -> None:
        """See :meth:`FailureGuard.barrier`. Collective: every rank, unless this one is failing. Blocks."""
        self._guard.barrier(name, plain)

    @property
    def supervision(self) -> Supervision:
        """What the engine says to this class."""
        guard, stop = self._guard, self._call.stop
        return Supervision(
            guard.publish,
            self.waiting,
            lambda: stop.local_stop,
            stop.agree,
            guard.sockets.recording,
        )

    def evaluation_starts(self) -> None:
        """A validation, test or prediction begins. Collective: none."""
        if self._call.stopper is not None:
            self._call.stopper.evaluation_starts()

    def evaluation_ends(self) -> None:
        """A validation, test or prediction ends. Collective: every rank. Blocks."""
        if self._call.stopper is not None:
            self._call.stopper.evaluation_ends()
