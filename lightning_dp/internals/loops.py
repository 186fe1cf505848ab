"""Every private name of Lightning's loops that stopping a run touches; as ``trainer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dp.internals.lightning import Callback, SIGTERMException, TrainerFn, pl
from lightning_dp.internals.patch import patched


def silence_per_batch_broadcast(trainer: pl.Trainer) -> Callable[[], None]:
    """Take away the broadcast of a stop flag before each micro-batch; returns what undoes it.

    It blocks the host once per micro-batch and swallows the error of a lost rank. Without the name there
    is nothing to take away.
    """
    loop = getattr(trainer.fit_loop, "epoch_loop", None)
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        return lambda: None
    return patched(loop, "_broadcast_sigterm_tensor", lambda: None)


def after_each_batch(trainer: pl.Trainer, act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` after each batch of training and evaluation, when all of its hooks have run.

    The loops then count the batch as completed, and save a checkpoint made by ``act`` as one made in
    ``on_train_batch_end``. Falls back to a callback, which runs before the module's own hook.

    Returns:
        Undoes it.
    """
    connector = getattr(trainer, "_logger_connector", None)
    original = getattr(connector, "on_batch_end", None)
    if original is None:
        return _callback_after_each_batch(trainer, act)

    def on_batch_end() -> None:
        original()
        act()

    return patched(connector, "on_batch_end", on_batch_end)


def _callback_after_each_batch(trainer: pl.Trainer, act: Callable[[], None]) -> Callable[[], None]:
    class AfterBatch(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            act()

        on_validation_batch_end = on_test_batch_end = on_train_batch_end

    callback = AfterBatch()
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(callback)
    return lambda: callbacks.remove(callback)


def set_received_sigterm(trainer: pl.Trainer) -> None:
    """Let the loops end where they look at ``trainer.received_sigterm``.

    Without the name the loops are left at once.
    """
    connector = getattr(trainer, "_signal_connector", None)
    if not hasattr(connector, "received_sigterm"):
        raise SIGTERMException
    connector.received_sigterm = True  # type: ignore[union-attr]


def evaluation_is_at_its_end(trainer: pl.Trainer) -> bool:
    """Whether the batch that was just evaluated is the loop's last. Falls back to yes: no early end."""
    if trainer.state.fn == TrainerFn.FITTING:
        loop: Any = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "val_loop", None)
    else:
        loop = trainer.test_loop if trainer.testing else trainer.validate_loop
    return bool(getattr(getattr(loop, "batch_progress", None), "is_last_batch", True))


def validation_progress(trainer: pl.Trainer) -> dict[str, Any] | None:
    """The progress of the validation inside of training, to be given to :func:`rewind_validation`."""
    loop = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "val_loop", None)
    progress = getattr(loop, "batch_progress", None)
    return progress.state_dict() if progress is not None else None


def rewind_validation(trainer: pl.Trainer, before: dict[str, Any]) -> None:
    """Let a checkpoint say that validation had begun and no batch of it was done.

    The loops then run all of it when they are resumed. A checkpoint that says "half done" makes them run
    as many batches as were missing, but from the beginning of the data.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.load_state_dict(before)
    progress.increment_ready()
    progress.increment_started()
