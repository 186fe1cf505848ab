"""The ranks of one call of the trainer meet, make their process group, and begin to watch each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_dp.faults.failure_guard import FailureGuard
from lightning_dp.faults.preemption import StopRequest
from lightning_dp.faults.store import with_prefix
from lightning_dp.internals import hydra as hydra_seams
from lightning_dp.internals import runs as run_seams
from lightning_dp.launch.environment import PARENT_VARIABLE, check_group, compare_members
from lightning_dp.launch.job import Job
from lightning_dp.launch.launcher import placement
from lightning_dp.launch.rendezvous import Rendezvous, describe_this_rank, rendezvous
from lightning_dp.launch.stores import reach_store

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy


def join(
    strategy: DDPStrategy,
    begin_job: Callable[[], Job],
    guard: FailureGuard,
    preemption: StopRequest,
    timeout_s: float,
) -> None:
    """Meet the other ranks, make the process group if there is none, begin to watch.

    Args:
        strategy: Whose ranks; does nothing for a world of one.
        begin_job: The job to use.
        guard: Opened with what the rendezvous gave.
        preemption: Told and heard of by the watchdog.
        timeout_s: Seconds to wait for ranks that are missing.

    Raises:
        LaunchError: Ranks are missing, or run another job.

    Collective: every rank. Blocks until all are there.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    rank, world_size = strategy.global_rank, strategy.world_size
    if dist.is_initialized():
        place = placement(environment, strategy.num_processes, strategy.num_nodes)
        check_group(place, dist.get_world_size())
    if world_size == 1:
        return
    job = begin_job()
    job.rank, job.world_size = rank, world_size
    if job.store is None:
        address = (environment.main_address, environment.main_port)
        reach_store(job, rank, address, timeout_s)
    met = _rendezvous(job, timeout_s)
    guard.sockets.spared_port = job.port
    if not dist.is_initialized():
        _make_group(strategy, met, guard)
    _watch(job, met, guard, preemption)


def _rendezvous(job: Job, timeout_s: float) -> Rendezvous:
    """Wait for the others and compare jobs. Collective: every rank. Blocks."""
    assert job.store is not None
    hydra_job = hydra_seams.hydra_job()
    met = rendezvous(
        job.store,
        job.rank,
        job.world_size,
        {**describe_this_rank(), "job": hydra_job.describe() if hydra_job is not None else None},
        timeout_s=timeout_s,
        check=job.check_peers,
    )
    job.first_process = met.processes[0]
    compare_members(met.members, job.rank)
    return met


def _make_group(strategy: DDPStrategy, met: Rendezvous, guard: FailureGuard) -> None:
    """The default process group. Collective: every rank. Blocks."""
    device: torch.device = strategy.root_device
    backend = run_seams.process_group_backend(strategy)
    with guard.sockets.recording():
        dist.init_process_group(
            backend,
            store=with_prefix("group", met.store),  # type: ignore[arg-type]
            rank=met.rank,
            world_size=met.world_size,
            timeout=run_seams.timeout_of(strategy),
            device_id=device if device.type != "cpu" else None,
        )


def _watch(job: Job, met: Rendezvous, guard: FailureGuard, preemption: StopRequest) -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    guard.open(
        with_prefix("guard", met.store),
        met.rank,
        met.processes,
        thread_store=with_prefix("guard", met.store.clone()),
        children=job.children.ended if job.children.processes else None,
        store_host=-1 if job.outlives_ranks else 0,
        parent_pid=int(parent) if parent else None,
    )
    assert guard.watchdog is not None
    guard.watchdog.hooks.append(preemption.share)
