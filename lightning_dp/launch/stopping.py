"""A preempted run in Lightning's loops: where it stops, what it writes, how it ends.

[Note: where a run stops] Lightning's loops end by themselves at the places where they look at
``received_sigterm``: after a batch and the validation due then, and at the end of an epoch. The flag is set
here, on all ranks at the same step. A validation would take long, so it is left at once; the loops are then
set back to its start, and a resumed run does the whole validation again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dp.faults.failure_guard import FailureGuard
from lightning_dp.faults.preemption import StopLine, StopRequest
from lightning_dp.faults.record import signal_name
from lightning_dp.internals import loops as loop_seams
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import ModelCheckpoint, SIGTERMException, TrainerFn, pl
from lightning_dp.launch.exit_code import PREEMPTED
from lightning_dp.launch.view import View

log = logging.getLogger(__name__)

_AGREEMENT_TIMEOUT_S = 1800.0  # for the other ranks, where all must agree


@dataclasses.dataclass(eq=False)
class Stopper:
    """Brings one call of the trainer to an early, agreed end.

    Args:
        trainer: Whose call.
        request: To stop, on this rank.
        guard: Reaches the other ranks.
        view: Says where the window is, and whether gradients carry the request.
        on_preempt: "checkpoint" or "stop".
        signals: Numbers of the signals that ask for it.
    """

    trainer: pl.Trainer
    request: StopRequest
    guard: FailureGuard
    view: View
    on_preempt: str
    signals: tuple[int, ...]

    def __post_init__(self) -> None:
        self._line: StopLine | None = None
        self._evaluations = 0
        self._points = 0
        self._before_validation: dict[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Take over the signals and the places where the loops look. Undone by :meth:`remove`."""
        if threading.current_thread() is threading.main_thread():  # only there signals are handled
            self.request.install(self.signals)
            self._undo.append(self._remove_handlers)
        self._undo += [
            run_seams.replace_signal_handlers(self.trainer, self.request.note),
            loop_seams.silence_per_batch_broadcast(self.trainer),
            loop_seams.after_each_batch(self.trainer, self._after_batch),
        ]

    def remove(self) -> None:
        """Give everything back."""
        while self._undo:
            self._undo.pop()()

    def _remove_handlers(self) -> None:
        run_seams.forget_handlers(self.trainer, self.request.previous)
        self.request.remove()

    def is_agreed(self, error: BaseException) -> bool:
        """Whether all ranks end with ``error`` together."""
        return self.request.agreed and isinstance(error, SIGTERMException)

    # Where the loops pass

    def _after_batch(self) -> None:
        """After each batch; nothing is asked of anybody while no stop was requested."""
        request, trainer = self.request, self.trainer
        if not (request.agreed or request.requested or request.local_stop):
            return
        if not self.view.window_is_closed():
            return  # its gradients would be lost, or its checkpoint postponed
        if not request.agreed and self._stops_here():
            request.agree()
        if request.agreed and trainer.training:
            loop_seams.set_received_sigterm(trainer)
        elif request.agreed:
            self._leave_evaluation()

    def _stops_here(self) -> bool:
        """Whether all ranks stop after this batch. Collective: see :meth:`StopLine.is_due`."""
        if self.trainer.training:
            batch = self.trainer.fit_loop.total_batch_idx
            return not self.view.gradients_carry_stop() and self._stop_line("training").is_due(
                batch
            )
        self._points += 1
        is_last = loop_seams.evaluation_is_at_its_end(self.trainer)
        return self._stop_line("evaluation").is_due(self._points, is_last=is_last)

    @property
    def _fits(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking

    def evaluation_starts(self) -> None:
        """A validation, test or prediction begins, on every rank."""
        self._evaluations += 1
        self._points = 0
        self._line = None
        self._before_validation = (
            loop_seams.validation_progress(self.trainer) if self._fits else None
        )
        if self.request.agreed and self.view.window_is_closed():
            self._leave_evaluation()

    def evaluation_ends(self) -> None:
        """A validation, test or prediction has ended, on every rank; it is not lost if a stop follows.

        Collective: every rank, once for each evaluation. Blocks.
        """
        request, channel = self.request, self.guard.channel
        stop = request.local_stop or request.requested
        if channel is not None and not request.agreed:
            with self.guard.waits.waiting("the end of the evaluation"):
                name = f"evaluation/{self._evaluations}"
                stop = channel.agree_any(name, stop, timeout_s=_AGREEMENT_TIMEOUT_S)
        self._line = None
        if not stop:
            return
        request.agree()
        if not self._fits:
            raise SIGTERMException(PREEMPTED)
        if self.view.window_is_closed():
            loop_seams.set_received_sigterm(self.trainer)

    def _stop_line(self, kind: str) -> StopLine:
        if self._line is None:
            self._line = StopLine(self.guard.channel, f"stop/{kind}/{self._evaluations}")
        return self._line

    def _leave_evaluation(self) -> None:
        """Leave at once; a resumed run evaluates from the start ([Note: where a run stops])."""
        if self._before_validation is not None:
            loop_seams.rewind_validation(self.trainer, self._before_validation)
        raise SIGTERMException(PREEMPTED)

    # The end

    def conclude(self, error: BaseException) -> None:
        """All ranks stop now: write the checkpoint, set the exit code.

        Args:
            error: The ``SIGTERMException`` on its way out.

        Collective: every rank. Blocks.
        """
        assert isinstance(error, SystemExit)
        error.code = PREEMPTED
        trainer, request, channel = self.trainer, self.request, self.guard.channel
        request.agree()
        requeue = any(number not in self.signals for number in request.received)
        if channel is not None:
            requeue = channel.agree_any("stop/requeue", requeue, timeout_s=_AGREEMENT_TIMEOUT_S)
        with trainer_seams.called_from_here(trainer):  # all ranks save: they may communicate
            if requeue and self._fits and run_seams.requeue_on_slurm(trainer):
                rank_zero_info(
                    f"lean_ddp: stopped at step {trainer.global_step}; the job is requeued."
                )
                return
            saved = self._save() if self._fits and self.on_preempt == "checkpoint" else ""
        names = ", ".join(sorted({signal_name(number) for number in request.received}))
        why = f" ({names})" if names else ""
        rank_zero_info(
            f"lean_ddp: asked to stop{why}: stopped at step {trainer.global_step} on all "
            f"ranks{saved}."
        )

    def _save(self) -> str:
        """Write the checkpoint, and say where. Collective: every rank. Blocks."""
        path = checkpoint_path(self.trainer)
        if path is None:
            return "; nothing was saved, because checkpointing is off (enable_checkpointing=False)"
        self.trainer.save_checkpoint(path, weights_only=False)
        return f"; checkpoint: {path}"


def checkpoint_path(trainer: pl.Trainer) -> str | None:
    """Where a preempted run's checkpoint goes: where ``ckpt_path="last"`` looks for it.

    Args:
        trainer: Its first ``ModelCheckpoint`` says where; without one (another ``Checkpoint`` callback),
            ``default_root_dir`` does.

    Returns:
        None for a run that asked for no files: ``enable_checkpointing=False``, ``fast_dev_run``.
    """
    if not trainer.checkpoint_callbacks or getattr(trainer, "fast_dev_run", False):
        return None
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if not callback.last_model_path:
            name = callback.format_checkpoint_name(
                dict(trainer.callback_metrics), callback.CHECKPOINT_NAME_LAST
            )
            callback.last_model_path = name
        return callback.last_model_path
    return os.path.join(trainer.default_root_dir, "last.ckpt")
