"""What stands around one call of the trainer: failure guard, request to stop, the job it is part of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning_dp.faults.failure_guard import FailureGuard
from lightning_dp.faults.preemption import StopRequest, signal_numbers
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import pl
from lightning_dp.launch import job as jobs
from lightning_dp.launch import torchrun
from lightning_dp.launch.stopping import Stopper
from lightning_dp.launch.view import Engine, View
from lightning_dp.options import FaultOptions


class GuardedCall:
    """One call of the trainer (``fit``, ``validate``, ``test``, ``predict``) after the other.

    Args:
        options: Checked options.
        engine: What is asked of the engine.

    Attributes:
        stop: The request to stop, on this rank.
        guard: Turns the failure of a rank into an error on all.
        job: Whose ranks take part; None until they are started or met.
        stopper: Brings the running call to an early end; None outside of one.
        only_launches: This process started the ranks of a failed run and is none itself.
    """

    def __init__(self, options: FaultOptions, engine: Engine) -> None:
        self.options = options
        self.signals = signal_numbers(options.preempt_signals)
        self.stop = StopRequest()
        self._view = view = View(engine)
        self.guard = FailureGuard(
            error_grace_s=options.error_grace_s,
            stall_report_s=options.stall_report_s,
            is_agreed=self._is_agreed,
            engine_wait=view.engine_wait,
            where=view.where,
            groups=view.groups,
            on_failure=torchrun.record,
        )
        self.stopper: Stopper | None = None
        self.job: jobs.Job | None = None
        self.only_launches = False

    def where(self) -> str:
        """What the rank is doing ("fit, step 12"); may be empty."""
        return self._view.where()

    def begin_job(self, key: str) -> jobs.Job:
        """Begin a job, or continue it."""
        self.job = jobs.begin(key, self.options.error_grace_s)
        return self.job

    def run(
        self, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``function`` under guard.

        Raises:
            RankFailedError: Another rank failed first.

        Collective: every rank calls it; it does not communicate by itself.
        """
        self.stop.reset()
        self._view.trainer = trainer
        job = self.job
        unfinished = job.unfinished(self._is_agreed) if job else contextlib.nullcontext()
        try:
            with unfinished, self.guard.guarding(), self._stoppable(trainer):
                return function(*args, **kwargs)
        finally:
            if (job := self.job) is not None:
                job.failed |= self.guard.failing
                first = self.guard.first
                job.dead_ranks = int(first is not None and not first.traceback)
                job.preempted |= self.stop.agreed

    @contextlib.contextmanager
    def _stoppable(self, trainer: pl.Trainer | None) -> Iterator[None]:
        if trainer is None:
            yield
            return
        undo_links = run_seams.atomic_links(trainer)
        self.stopper = stopper = Stopper(
            trainer,
            self.stop,
            self.guard,
            self._view,
            self.options.on_preempt,
            self.signals,
        )
        if self.options.on_preempt != "ignore":
            stopper.install()
        try:
            with trainer_seams.called_from_here(trainer):
                yield
        except BaseException as error:
            if stopper.is_agreed(error):
                stopper.conclude(error)
            raise
        finally:
            stopper.remove()
            undo_links()
            self.stopper = None

    def _is_agreed(self, error: BaseException) -> bool:
        agreed = self.stop.agreed and isinstance(error, SystemExit)
        return agreed or run_seams.is_agreed_end(error)

    def __getstate__(self) -> dict[str, Any]:
        """A spawned rank begins a job of its own."""
        return {**self.__dict__, "job": None, "stopper": None}
