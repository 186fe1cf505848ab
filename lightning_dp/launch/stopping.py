"""A preempted run in Lightning's loops: where it stops, what it writes, how it ends.

[Note: where a run stops] Lightning's loops end by themselves at the places where they look at
``received_sigterm``: after a batch and the validation due then, and at the end of an epoch. The flag is set
here, on all ranks at the same step. A validation would take long, so it is left at once; the loops are then
set back to its start, and a resumed run does the whole validation again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dp.faults.failure_guard import FailureGuard
from lightning_dp.faults.preemption import StopLine, StopRequest, name_of
from lightning_dp.internals import loops as loop_seams
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import ModelCheckpoint, SIGTERMException, TrainerFn, pl
from lightning_dp.launch.exit_code import PREEMPTED

log = logging.getLogger(__name__)


class Stopper:
    """Brings one call of the trainer to an early, agreed end.

    Args:
        trainer: Whose call.
        preemption: The request.
        guard: Reaches the other ranks.
        on_preempt: "checkpoint" or "stop".
        signals: Numbers of the signals that ask for it.
        timeout_s: Seconds to wait for the other ranks where all must agree.
        window_is_closed: Whether no accumulation is going on.
        tail_carries_stop: Whether gradients carry the request (automatic optimization).
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        preemption: StopRequest,
        guard: FailureGuard,
        *,
        on_preempt: str,
        signals: tuple[int, ...],
        timeout_s: float,
        window_is_closed: Callable[[], bool],
        tail_carries_stop: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._preemption = preemption
        self._guard = guard
        self._on_preempt = on_preempt
        self._signals = signals
        self._timeout_s = timeout_s
        self._window_is_closed = window_is_closed
        self._tail_carries_stop = tail_carries_stop
        self._line: StopLine | None = None
        self._evaluations = 0
        self._points = 0
        self._before_validation: dict[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Take over the signals and the places where the loops look. Undone by :meth:`remove`."""
        if threading.current_thread() is threading.main_thread():  # only there signals are handled
            self._preemption.install(self._signals)
            self._undo.append(self._remove_handlers)
        self._undo += [
            run_seams.replace_signal_handlers(self._trainer, self._preemption.note),
            loop_seams.silence_per_batch_broadcast(self._trainer),
            loop_seams.after_each_batch(self._trainer, self._after_batch),
        ]

    def remove(self) -> None:
        """Give everything back."""
        while self._undo:
            self._undo.pop()()

    def _remove_handlers(self) -> None:
        run_seams.forget_handlers(self._trainer, self._preemption.previous)
        self._preemption.remove()

    def is_agreed(self, error: BaseException) -> bool:
        """Whether all ranks end with ``error`` together."""
        return self._preemption.agreed and isinstance(error, SIGTERMException)

    # Where the loops pass

    def _after_batch(self) -> None:
        """After each batch; nothing is asked of anybody while no stop was requested."""
        preemption = self._preemption
        if not (preemption.agreed or preemption.requested or preemption.local_stop):
            return
        if not self._window_is_closed():
            return  # its gradients would be lost, or its checkpoint postponed
        trainer = self._trainer
        if trainer.training:
            self._after_train_batch()
        elif preemption.agreed:
            self._leave_evaluation()
        else:
            self._points += 1
            is_last = loop_seams.evaluation_is_at_its_end(trainer)
            if self._stop_line("evaluation").is_due(self._points, is_last=is_last):
                preemption.agree()
                self._leave_evaluation()

    def _after_train_batch(self) -> None:
        preemption, trainer = self._preemption, self._trainer
        if not preemption.agreed and not self._tail_carries_stop():
            due = self._stop_line("training").is_due(trainer.fit_loop.total_batch_idx)
            if due:
                preemption.agree()
        if preemption.agreed:
            loop_seams.set_received_sigterm(trainer)

    def evaluation_starts(self) -> None:
        """A validation, test or prediction begins, on every rank."""
        self._evaluations += 1
        self._points = 0
        self._line = None
        trainer = self._trainer
        self._before_validation = None
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._before_validation = loop_seams.validation_progress(trainer)
        if self._preemption.agreed and self._window_is_closed():
            self._leave_evaluation()

    def evaluation_ends(self) -> None:
        """A validation, test or prediction has ended, on every rank; it is not lost if a stop follows.

        Collective: every rank, once for each evaluation. Blocks.
        """
        preemption, channel, trainer = self._preemption, self._guard.channel, self._trainer
        stop = preemption.local_stop or preemption.requested
        if channel is not None and not preemption.agreed:
            with self._guard.waits.waiting("the end of the evaluation"):
                name = f"evaluation/{self._evaluations}"
                stop = channel.agree_any(name, stop, timeout_s=self._timeout_s)
        self._line = None
        if not stop:
            return
        preemption.agree()
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            raise SIGTERMException(PREEMPTED)
        if self._window_is_closed():
            loop_seams.set_received_sigterm(trainer)

    def _stop_line(self, kind: str) -> StopLine:
        if self._line is None:
            self._line = StopLine(self._guard.channel, f"stop/{kind}/{self._evaluations}")
        return self._line

    def _leave_evaluation(self) -> None:
        """Leave at once; a resumed run evaluates from the start ([Note: where a run stops])."""
        if self._before_validation is not None:
            loop_seams.rewind_validation(self._trainer, self._before_validation)
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
        trainer, preemption, channel = self._trainer, self._preemption, self._guard.channel
        preemption.agreed = True
        requeue = any(number not in self._signals for number in preemption.received)
        if channel is not None:
            requeue = channel.agree_any("stop/requeue", requeue, timeout_s=self._timeout_s)
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        with trainer_seams.called_from_here(trainer):  # all ranks save: they may communicate
            requeued = requeue and fitting and run_seams.requeue_on_slurm(trainer)
        if requeued:
            rank_zero_info(f"lean_ddp: stopped at step {trainer.global_step}; the job is requeued.")
            return
        saved = ""
        if fitting and self._on_preempt == "checkpoint":
            path = checkpoint_path(trainer)
            if path is None:
                saved = (
                    "; nothing was saved, because checkpointing is off (enable_checkpointing=False)"
                )
            else:
                with trainer_seams.called_from_here(trainer):
                    trainer.save_checkpoint(path, weights_only=False)
                saved = f"; checkpoint: {path}"
        names = ", ".join(sorted({name_of(number) for number in preemption.received}))
        why = f" ({names})" if names else ""
        rank_zero_info(
            f"lean_ddp: asked to stop{why}: stopped at step {trainer.global_step} on all "
            f"ranks{saved}."
        )


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
