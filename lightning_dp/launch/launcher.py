"""Start the other ranks by running the program again, and guard every call of the trainer."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_dp.faults.record import brief_of
from lightning_dp.internals import hydra as hydra_seams
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals.hydra import HydraJob
from lightning_dp.internals.lightning import ClusterEnvironment, pl
from lightning_dp.launch import exit_code
from lightning_dp.launch import job as jobs
from lightning_dp.launch.command import Program, check_repeatable, child_command
from lightning_dp.launch.environment import PID_VARIABLE, Placement, check_placement
from lightning_dp.launch.guarded_call import GuardedCall
from lightning_dp.launch.stores import host_store

log = logging.getLogger(__name__)


class LeanScriptLauncher(run_seams.ScriptLauncher):  # type: ignore[misc]
    """Runs the program once more for each other rank of this machine.

    A subclass of Lightning's launcher, which Lightning looks for when it handles Ctrl+C.

    Args:
        cluster_environment: Who says what the ranks are.
        num_processes: Ranks on this machine.
        num_nodes: Machines.
        call: Guards calls of the trainer.
    """

    is_interactive_compatible = False

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        call: GuardedCall,
    ) -> None:
        self.cluster_environment = cluster_environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        self._call = call

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start what is missing, then call ``function`` under guard.

        Raises:
            LaunchError: The environment is not what the Trainer thinks, or the program cannot be
                started again.
            RankFailedError: Another rank failed first.

        Collective: every rank. The call itself decides whether it blocks.
        """
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        hydra_job = hydra_seams.hydra_job()
        place = Placement.of(self.cluster_environment, self.num_processes, self.num_nodes)
        for text in check_placement(place, os.environ):
            rank_zero_only(log.warning)(text)
        job = self._call.begin_job(_job_key(hydra_job))
        if hydra_job is not None and not job.ends_with_job:
            act = partial(_end_job, is_sweep=bool(hydra_job.launcher))
            job.ends_with_job = hydra_seams.on_hydra_job_end(act)
        if not self.cluster_environment.creates_processes_externally and self._wanted > 1:
            with job.unfinished():
                self._start(job, hydra_job)
        run_seams.set_num_threads(self.num_processes)
        return self._call.run(trainer, function, *args, **kwargs)

    def kill(self, signum: int) -> None:
        """Send ``signum`` to the ranks started here.

        SIGKILL comes from Lightning after Ctrl+C. Ranks that have been told leave by themselves, through
        their ``finally`` blocks; what is left after 3 ``error_grace_s`` is ended.
        """
        job = jobs.current()
        if job is None:
            return
        if signum == getattr(signal, "SIGKILL", None):
            job.end_children(know_why=self._call.guard.first is not None)
        else:
            job.children.send(signum)

    @property
    def _wanted(self) -> int:
        return self.num_processes * self.num_nodes

    def _start(self, job: jobs.Job, hydra_job: HydraJob | None) -> None:
        """Open the store, set the environment, start local ranks 1 and up."""
        program = Program.of_this_process()
        if self.num_processes > 1:
            check_repeatable(program, hydra_job)
        environment = self.cluster_environment
        if self.num_nodes == 1:
            job.hosted = host_store()
            address, port = "127.0.0.1", job.hosted.port
        else:
            address, port = environment.main_address, environment.main_port
        node = environment.node_rank()
        os.environ.update(
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            NODE_RANK=str(node),
            LOCAL_RANK="0",
            RANK=str(node * self.num_processes),
            WORLD_SIZE=str(self._wanted),
        )
        os.environ[PID_VARIABLE] = str(os.getpid())
        pinned = hydra_seams.pin_drawn_values()
        for local_rank in range(1, self.num_processes):
            rank = node * self.num_processes + local_rank
            own = {"LOCAL_RANK": local_rank, "RANK": rank, hydra_seams.PINNED_VARIABLE: len(pinned)}
            env = {**os.environ, **{name: str(value) for name, value in own.items()}}
            cwd = hydra_job.cwd if hydra_job is not None else program.cwd
            command = child_command(program, hydra_job, local_rank, pinned=pinned)
            job.children.start(rank, command, env, cwd)


def _end_job(error: BaseException | None, *, is_sweep: bool) -> BaseException | None:
    """A Hydra job has ended; Hydra turns every error of a job into exit code 1."""
    code = exit_code.code_of(error)
    if code > 1 and not is_sweep:
        exit_code.remember(code)
    line = brief_of(error)
    failure = jobs.end(failed=error is not None)
    # A sweep's result stays what it is, for sweepers that look at it.
    return hydra_seams.one_line(line) if line and not is_sweep else failure


def _job_key(hydra_job: HydraJob | None) -> str:
    return f"{hydra_job.output_dir}#{hydra_job.number}" if hydra_job is not None else "program"
