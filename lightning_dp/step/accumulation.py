"""Accumulation as the Trainer sees it: where a window ends, what its tail does, schedules, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import pl
from lightning_dp.step.window_state import load_window_state, window_state

log = logging.getLogger(__name__)


class WindowKeeper:
    """Counts micro-batches itself and tells the Trainer when to step.

    The Trainer derives a window's end from the batch index, so it forgets a window at an epoch's end and
    after a resume. One counter, owned here, serves stepping, zeroing, schedules and checkpoints alike.

    Args:
        window: The engine's window.
        tail: What becomes of an incomplete window at an epoch's end: ``"step"`` with the right scale,
            ``"carry"`` it into the next epoch, or ``"drop"`` it.
        mid_window: What a checkpoint inside a window does: ``"save"`` the partial gradients, or wait for
            the ``"boundary"``.
    """

    def __init__(self, window: AccumulationWindow, tail: str, mid_window: str) -> None:
        self.window = window
        self.tail = tail
        self.mid_window = mid_window
        self.last_step_skipped = False
        self._trainer: pl.Trainer | None = None
        self._ran = False
        self._stepped = False
        self._ends = False
        self._manual_backwards = 0
        self._restored: Mapping[str, Any] | None = None
        self._postponed: list[tuple[Any, bool, Any]] = []
        self._undo: list[Any] = []

    # Life time

    def attach(self, trainer: pl.Trainer) -> None:
        """Take over the Trainer's decisions about windows; before optimizers are configured."""
        self.detach()
        self._trainer = trainer
        self._undo = [
            trainer_seams.own_window(
                trainer,
                ends=self.window_ends,
                is_fresh=lambda: self.window.position == 0,
            ),
            trainer_seams.own_schedules(trainer, lambda: self.last_step_skipped),
            trainer_seams.own_estimate(trainer, self.estimate),
        ]

    def detach(self) -> None:
        """Give the Trainer its own ways back."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self._trainer = None

    # Where the window ends

    @property
    def steps(self) -> int:
        """Micro-batches of a full window."""
        return int(self._trainer.accumulate_grad_batches) if self._trainer is not None else 1

    @property
    def most_steps(self) -> int:
        """The same of the largest window, where a schedule changes them."""
        trainer = self._trainer
        schedule = trainer_seams.accumulation_schedule(trainer) if trainer is not None else None
        if trainer is None or schedule is None:
            return self.steps
        epochs = trainer.max_epochs or 0
        return max(map(schedule, range(epochs if epochs > 0 else 1000)))

    def window_ends(self, *, is_last_batch: bool) -> bool:
        """Whether the micro-batch that runs now ends the window: it is full, or the epoch's last one.

        The window then ends whether or not an optimizer steps: a module may decline to, and zeroes its
        gradients before the next batch as on one device.
        """
        full = self.window.position + 1 >= self.steps
        self._ends = full or (is_last_batch and self.tail == "step")
        return self._ends

    def begin_batch(self, batch_idx: int, *, automatic: bool) -> None:
        """Move on to the next micro-batch; settle what the last epoch left at ``batch_idx`` 0."""
        window = self.window
        if self._stepped or (self._ran and self._ends):
            window.position = 0
        elif self._ran and automatic:
            window.position += 1
        if self._stepped or self._ran:
            self._restored = None
        self._ran = self._stepped = self._ends = False
        if batch_idx == 0:
            self._settle_epoch(automatic)
        if window.position == 0:
            self.save_postponed()

    def note_forward(self) -> None:
        """A micro-batch runs in automatic optimization, with or without a loss."""
        self._ran = True

    def note_manual_backward(self) -> None:
        """A backward ran in manual optimization."""
        self._manual_backwards += 1

    def note_step(self, *, skipped: bool) -> None:
        """An optimizer stepped, or a gradient scaler decided that it must not."""
        self._stepped = True
        self._manual_backwards = 0
        self.last_step_skipped = skipped

    def _settle_epoch(self, automatic: bool) -> None:
        """At an epoch's start: what of the last epoch was not stepped?"""
        left = self.window.position if automatic else self._manual_backwards
        if not left or self._restored is not None or self.tail == "carry":
            return
        log.warning(
            "lean_ddp: %d micro-batch(es) at the end of the last epoch were not followed by an optimizer"
            " step. Their gradients are dropped; incomplete_window='carry' keeps them for the next window.",
            left,
        )
        self.window.reset()
        self.window.position = 0
        self._manual_backwards = 0
        if self._trainer is not None:
            for parameter in self._trainer.lightning_module.parameters():
                parameter.grad = None

    # Schedules

    def estimate(self, estimated: float) -> float:
        """Correct the Trainer's count of optimizer steps for changing windows and tails."""
        trainer = self._trainer
        if trainer is None or trainer.max_epochs in (None, -1):
            return estimated
        batches = trainer.num_training_batches
        schedule = trainer_seams.accumulation_schedule(trainer)
        if math.isinf(batches) or (schedule is None and self.tail == "step"):
            return estimated
        total = left = 0
        for epoch in range(max(int(trainer.max_epochs or 0), 1)):
            window = schedule(epoch) if schedule is not None else self.steps
            if self.tail == "carry":
                steps, left = divmod(left + int(batches), window)
            else:
                steps = int(batches) // window
                steps += self.tail == "step" and int(batches) % window > 0
            total += steps
        return min(total, trainer.max_steps) if trainer.max_steps != -1 else total

    def say_misfits(self) -> None:
        """Warn once, at the start, about settings that cut windows in unexpected places."""
        trainer = self._trainer
        if trainer is None or self.steps <= 1:
            return
        batches, check = trainer.num_training_batches, trainer.val_check_batch
        if batches < self.steps:
            log.warning(
                "lean_ddp: an epoch has %s batches a rank, fewer than accumulate_grad_batches=%d: each"
                " epoch %s.",
                batches,
                self.steps,
                {
                    "step": "makes one step of what it has, with the right scale",
                    "carry": "adds to a window that spans epochs",
                    "drop": "is dropped whole (incomplete_window='drop')",
                }[self.tail],
            )
        if check is not None and check != float("inf") and check < batches and check % self.steps:
            log.warning(
                "lean_ddp: val_check_interval=%s batches is not a multiple of"
                " accumulate_grad_batches=%d: some validations run inside a window, on weights that are"
                " up to %d micro-batches old.",
                check,
                self.steps,
                self.steps - 1,
            )

    # Checkpoints

    @property
    def is_inside(self) -> bool:
        """Whether micro-batches wait for their optimizer step. The same on every rank."""
        return not self._stepped and not self._is_over and self._done > 0

    @property
    def waiting(self) -> int:
        """Micro-batches of automatic optimization without their optimizer step; the running one counts."""
        over = self._stepped or self._is_over or self._manual_backwards
        return 0 if over else self._done

    @property
    def _is_over(self) -> bool:
        """Whether the window's last batch is, without a step: its module declined to make one."""
        return (
            self._ends and self._trainer is not None and trainer_seams.is_processed(self._trainer)
        )

    @property
    def _done(self) -> int:
        return self._manual_backwards or self.window.position + self._ran

    def postpone(self, path: Any, weights_only: bool, options: Any) -> bool:
        """Put a save off to the next boundary, if so configured; return whether it was.

        In a window of this rank's own too: there is no sum over ranks that could be saved.
        """
        waits = self.mid_window == "boundary" or self.window.is_local
        if not waits or not self.is_inside:
            return False
        self._postponed.append((path, weights_only, options))
        return True

    def save_postponed(self) -> None:
        """Save what waited for the boundary. Collective: every rank."""
        postponed, self._postponed = self._postponed, []
        if self._trainer is not None:
            for path, weights_only, options in postponed:
                self._trainer.save_checkpoint(path, weights_only, storage_options=options)

    def state(self, reducer: Reducer) -> dict[str, Any] | None:
        """What a checkpoint needs of the current window; ``None`` between windows.

        Collective: every rank, at the same micro-batch. Blocks.
        """
        if not self.is_inside:
            return None
        return {**window_state(reducer), "position": self._done}

    def remember(self, state: Mapping[str, Any] | None) -> None:
        """Keep a loaded state until the engine is there."""
        self._restored = state

    def restore(self, reducer: Reducer) -> None:
        """Put the remembered window back, when training starts. Local; every rank calls it."""
        if self._restored is None:
            return
        load_window_state(reducer, self._restored, self.steps)
        # ``begin_batch`` has not seen these micro-batches run: the position is already right.
        self._ran = self._stepped = self._ends = False
