"""Every private name of Lightning that we touch, one small function each, with what it falls back to.

A Lightning upgrade is a read of this file. Each function has a test, also for the name being gone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightning_dp.internals.lightning import LayerSync, TorchSyncBatchNorm, callbacks, pl
from lightning_dp.internals.patch import all_of, patched

# -- Engine


def is_unwinding(trainer: pl.Trainer | None) -> bool:
    """Whether the trainer is on its way out with an exception, perhaps on this rank only.

    Anything collective would then wait for ranks that may never come. ``TrainerStatus.INTERRUPTED`` is
    set first; where it is missing, an exception being handled says the same, unless the trainer was called
    while it was handled already (:func:`called_from_here`).
    """
    status = getattr(getattr(trainer, "state", None), "status", None)
    if status is not None and str(getattr(status, "value", status)) == "interrupted":
        return True
    error = sys.exc_info()[1]
    if error is None or error is _handled_before.get(id(trainer)):
        return False
    return not isinstance(error, (StopIteration, KeyError, AttributeError))


_handled_before: dict[int, BaseException | None] = {}


@contextlib.contextmanager
def called_from_here(trainer: pl.Trainer) -> Iterator[None]:
    """Around a call of the trainer, which may stand in an ``except`` block: that error is not its own."""
    before = _handled_before.get(id(trainer))
    _handled_before[id(trainer)] = sys.exc_info()[1]
    try:
        yield
    finally:
        _handled_before[id(trainer)] = before
        if before is None:
            del _handled_before[id(trainer)]


def averages_weights(trainer: pl.Trainer) -> bool:
    """Whether a callback averages the module's weights and buffers while it trains (EMA, SWA)."""
    kinds = callbacks.WeightAveraging, callbacks.StochasticWeightAveraging
    return any(isinstance(callback, kinds) for callback in getattr(trainer, "callbacks", ()))


def replace_layer_sync(strategy: Any, ours: LayerSync) -> None:
    """Use ``ours`` where ``Trainer(sync_batchnorm=True)`` asked for torch's layers; a user's plugin stays.

    Without the attribute nothing is replaced, and torch's layers raise on a CPU.
    """
    if isinstance(getattr(strategy, "_layer_sync", None), TorchSyncBatchNorm):
        strategy._layer_sync = ours


def attached_trainer(module: Any) -> pl.Trainer | None:
    """The module's trainer, or ``None`` where it has none (the public property raises)."""
    return getattr(module, "_trainer", None)


def rank_batch_size(trainer: pl.Trainer) -> int | None:
    """Samples in a rank's training batch; ``None`` where loaders are several, or batches of no one size."""
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return size if isinstance(size, int) else None


# -- Accumulation


def own_window(
    trainer: pl.Trainer,
    *,
    ends: Callable[..., bool],
    is_fresh: Callable[[], bool],
) -> Callable[[], None]:
    """Let our counter decide when the Trainer steps and when it zeroes gradients.

    Falls back to the Trainer's own rule, which counts from each epoch's first batch.

    Returns:
        Undoes it.
    """
    epoch_loop = getattr(trainer.fit_loop, "epoch_loop", None)
    automatic = getattr(epoch_loop, "automatic_optimization", None)
    names = ("_should_accumulate", "_num_ready_batches_reached")
    if not all(hasattr(epoch_loop, name) for name in names) or not all(
        hasattr(automatic, name)
        for name in ("_make_zero_grad_fn", "_on_before_zero_grad", "_optimizer_zero_grad")
    ):
        return lambda: None
    assert epoch_loop is not None
    assert automatic is not None

    def should_accumulate() -> bool:
        return not ends(is_last_batch=epoch_loop._num_ready_batches_reached())

    def make_zero_grad(batch_idx: int, optimizer: Any) -> Callable[[], None] | None:
        if not is_fresh() or getattr(automatic, "_skip_backward", False):
            return None

        def zero_grad() -> None:
            automatic._on_before_zero_grad(optimizer)
            automatic._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad

    return all_of(
        patched(epoch_loop, "_should_accumulate", should_accumulate),
        patched(automatic, "_make_zero_grad_fn", make_zero_grad),
    )


def is_processed(trainer: pl.Trainer) -> bool:
    """Whether the training batch that came last has been optimized, or declined. Falls back to yes."""
    progress = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "batch_progress", None)
    current: Any = getattr(progress, "current", None)
    return bool(getattr(current, "processed", 0) >= getattr(current, "ready", 0))


def ends_with_step(trainer: pl.Trainer) -> bool:
    """Whether training is known to end with the optimizer step that was made just now.

    ``max_steps``, or the last batch of the last epoch. Early stopping and the like show later. The same on
    all ranks, as loaders end together.
    """
    if trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs:
        return True
    # Automatic optimization counts a step after the strategy made it.
    counted = trainer.global_step + trainer.lightning_module.automatic_optimization
    return 0 <= trainer.max_steps <= counted


def own_schedules(trainer: pl.Trainer, step_was_skipped: Callable[[], bool]) -> Callable[[], None]:
    """Let a scheduler's ``frequency`` count optimizer steps, and hold it back after a skipped one.

    The Trainer compares ``frequency`` with the micro-batch index. Falls back to that.

    Returns:
        Undoes it.
    """
    epoch_loop = getattr(trainer.fit_loop, "epoch_loop", None)
    original = getattr(epoch_loop, "_update_learning_rates", None)
    if original is None:
        return lambda: None

    def update(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step":
            original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
            return
        if step_was_skipped():
            return
        configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
        frequencies = [config.frequency for config in configs]
        try:
            for config in configs:
                due = trainer.global_step % config.frequency == 0
                config.frequency = 1 if due else sys.maxsize
            original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
        finally:
            for config, frequency in zip(configs, frequencies, strict=True):
                config.frequency = frequency

    return patched(epoch_loop, "_update_learning_rates", update)


def own_estimate(trainer: pl.Trainer, correct: Callable[[float], float]) -> Callable[[], None]:
    """Correct ``trainer.estimated_stepping_batches``, for this trainer only.

    A property lives on the class, so the class gets one that asks whose it is.

    Returns:
        Undoes it.
    """
    cls: Any = type(trainer)
    read = cls.estimated_stepping_batches.fget

    def estimated(self: pl.Trainer) -> float:
        value: float = read(self)
        return correct(value) if self is trainer else value

    return patched(cls, "estimated_stepping_batches", property(estimated))


def offer_no_sync(module: Any, no_sync: Callable[[], Any]) -> Callable[[], None]:
    """Let ``trainer.model.no_sync()`` work while ``module`` trains.

    Public code asks a ``DDPStrategy`` for it. Nothing is stored on the module: its class answers, for this
    module only. A class that has the method keeps it.

    Returns:
        Undoes it.
    """
    cls = type(module)
    if hasattr(cls, "no_sync"):
        return lambda: None

    def ask(self: Any) -> Any:
        if self is not module:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'no_sync'")
        return no_sync()

    return patched(cls, "no_sync", ask)


def around_validation(
    trainer: pl.Trainer, context: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[[], None]:
    """Enter a context around each validation of a fit, before the first of its hooks.

    Callbacks that put weights of their own into the module do so in ``on_validation_start``, which is
    called before the strategy's. Without the Trainer's loop nothing is replaced: the strategy's hooks stay.

    Returns:
        Undoes it.
    """
    loop = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "val_loop", None)
    run = getattr(loop, "run", None)
    if run is None:
        return lambda: None

    def inside() -> Any:
        with context():
            return run()

    return patched(loop, "run", inside)


def accumulation_schedule(trainer: pl.Trainer) -> Callable[[int], int] | None:
    """Micro-batches a window by epoch, where a ``GradientAccumulationScheduler`` changes them."""
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, callbacks.GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches
    return None
