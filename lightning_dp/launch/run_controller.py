"""One object between the strategy and everything about starting, failing and stopping."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_dp.engine.reduction.failure import Supervision
from lightning_dp.faults.failure_guard import FailureGuard
from lightning_dp.faults.preemption import StopRequest, signal_numbers
from lightning_dp.internals import runs as run_seams
from lightning_dp.launch import job as jobs
from lightning_dp.launch import torchrun
from lightning_dp.launch.joining import join
from lightning_dp.launch.launcher import LeanScriptLauncher
from lightning_dp.launch.processes import LeanProcessLauncher
from lightning_dp.launch.stopping import Stopper
from lightning_dp.launch.view import Engine, View
from lightning_dp.options import FaultOptions

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

log = logging.getLogger(__name__)

T = TypeVar("T")
_AGREEMENT_TIMEOUT_S = 1800.0


class RunController:
    """Follows the strategy from the launch to the end of each call of the trainer.

    Args:
        options: Checked options.
        engine: What is asked of the engine.

    Attributes:
        guard: The failure channel.
        preemption: The request to stop; ``local_stop`` is for the control tail.
        only_launches: This process started the ranks of a failed run and is none itself.
    """

    def __init__(self, options: FaultOptions, engine: Engine) -> None:
        self.options = options
        self.signals = signal_numbers(options.preempt_signals)
        self._view = View(engine)
        self.preemption = StopRequest()
        self.guard = FailureGuard(
            error_grace_s=options.error_grace_s,
            stall_report_s=options.stall_report_s,
            is_agreed=self._is_agreed,
        )
        self.guard.on_failure.append(torchrun.record)
        self.guard.waits.engine = self._view.engine_wait
        self.guard.where = self._view.where
        self.guard.groups = self._view.groups
        self._stopper: Stopper | None = None
        self._job: jobs.Job | None = None
        self.only_launches = False

    @staticmethod
    def world_size(strategy: DDPStrategy) -> int:
        """How many ranks the strategy wants."""
        return strategy.num_nodes * strategy.num_processes

    @property
    def failing(self) -> bool:
        """Whether this rank is on its way out with an error; nothing collective can succeed."""
        return self.guard.failing

    # Launch

    def make_launcher(self, strategy: Any, start_method: str) -> Any:
        """The launcher for ``strategy``."""
        if start_method == "popen":
            return LeanScriptLauncher(
                strategy.cluster_environment, strategy.num_processes, strategy.num_nodes, self
            )
        return LeanProcessLauncher(strategy, start_method, self)

    def begin_job(self, key: str) -> jobs.Job:
        """Begin a job, or continue it."""
        self._job = jobs.begin(key, self.options.error_grace_s)
        return self._job

    @staticmethod
    @rank_zero_only
    def report_warnings(warnings: Iterable[str]) -> None:
        """Log what looks odd, once."""
        for text in warnings:
            log.warning(text)

    def run(
        self, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``function`` under guard.

        Raises:
            RankFailedError: Another rank failed first.

        Collective: every rank calls it; it does not communicate by itself.
        """
        self.preemption.reset()
        self._view.trainer = trainer
        job = self._job
        unfinished = job.unfinished(self._is_agreed) if job else contextlib.nullcontext()
        try:
            with unfinished, self.guard.guarding(), self._stoppable(trainer):
                return function(*args, **kwargs)
        finally:
            if self._job is not None:
                self._job.failed |= self.failing
                first = self.guard.first
                self._job.dead_ranks = int(first is not None and not first.traceback)
                self._job.preempted |= self.preemption.agreed

    @contextlib.contextmanager
    def _stoppable(self, trainer: pl.Trainer | None) -> Any:
        if trainer is None:
            yield
            return
        undo_links = run_seams.atomic_links(trainer)
        self._stopper = stopper = Stopper(
            trainer,
            self.preemption,
            self.guard,
            on_preempt=self.options.on_preempt,
            signals=self.signals,
            timeout_s=_AGREEMENT_TIMEOUT_S,
            window_is_closed=self._view.window_is_closed,
            tail_carries_stop=self._view.tail_carries_stop,
        )
        if self.options.on_preempt != "ignore":
            stopper.install()
        try:
            yield
        except BaseException as error:
            if stopper.is_agreed(error):
                stopper.conclude(error)
            raise
        finally:
            stopper.remove()
            undo_links()
            self._stopper = None

    def _is_agreed(self, error: BaseException) -> bool:
        agreed = self.preemption.agreed and isinstance(error, SystemExit)
        return agreed or run_seams.is_agreed_end(error)

    # The strategy's hooks

    def setup_distributed(self, strategy: DDPStrategy, default: Callable[[], None]) -> None:
        """Meet the other ranks and begin to watch; then what the strategy would do.

        Args:
            strategy: Whose ranks.
            default: Finds a process group that exists already.

        Raises:
            LaunchError: Ranks are missing, or run another job.

        Collective: every rank. Blocks until all are there, for ``rendezvous_timeout_s`` at most.
        """
        strategy.set_world_ranks()
        timeout_s = self.options.rendezvous_timeout_s
        join(strategy, self._any_job, self.guard, self.preemption, timeout_s)
        default()

    def _any_job(self) -> jobs.Job:
        return self._job or self.begin_job("program")

    def while_waiting(self, what: str, call: Callable[[], T], alone: T) -> T:
        """Communicate through ``call``; where this rank is failing, do not, and return ``alone``.

        Args:
            what: Names it in reports; empty for one in which not all ranks take part.
            call: Communicates.
            alone: Returned instead.

        Collective: as ``call``'s.
        """
        if self.guard.failing:
            return alone
        if not what:
            return call()
        with self.guard.waits.waiting(what):
            return call()

    def barrier(self, name: str, plain: Callable[[], None]) -> None:
        """See :meth:`FailureGuard.barrier`. Collective: every rank, unless this one is failing. Blocks."""
        self.guard.barrier(name, plain)

    @property
    def supervision(self) -> Supervision:
        """What the engine says to this class."""
        stop = self.preemption
        return Supervision(
            self.guard.publish, self.guard.waits.waiting, lambda: stop.local_stop, stop.agree
        )

    def evaluation_starts(self) -> None:
        """A validation, test or prediction begins. Collective: none."""
        if self._stopper is not None:
            self._stopper.evaluation_starts()

    def evaluation_ends(self) -> None:
        """A validation, test or prediction ends. Collective: every rank. Blocks."""
        if self._stopper is not None:
            self._stopper.evaluation_ends()

    def __getstate__(self) -> dict[str, Any]:
        """A spawned rank begins a job of its own."""
        return {**self.__dict__, "_job": None, "_stopper": None}
