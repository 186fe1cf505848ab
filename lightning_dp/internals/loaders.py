"""Every private name of Lightning that the data plane touches; continues ``trainer.py``.

The same rules: one small function each, with what it falls back to, and a test also for the name being
gone. Loops are public attributes of the Trainer, but what they hold is not documented, so it is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning_dp.internals.lightning import overrides, pl
from lightning_dp.internals.patch import patched

# -- Who gives loaders their samplers


def user_wants_sharding(trainer: pl.Trainer) -> bool:
    """Whether ``Trainer(use_distributed_sampler=...)`` was left at True. Falls back to True."""
    connector = getattr(trainer, "_accelerator_connector", None)
    return bool(getattr(connector, "use_distributed_sampler", True))


def take_over_loaders(trainer: pl.Trainer) -> Callable[[], None] | None:
    """Keep the Trainer from making loaders anew: it would guess constructor arguments.

    Where the method is missing, the Trainer's flag is switched off, which leaves only prediction to it.

    Returns:
        Undoes it; ``None`` if neither exists and the Trainer's own samplers stay.
    """
    connector = getattr(trainer, "_data_connector", None)
    if callable(getattr(connector, "_prepare_dataloader", None)):
        return patched(connector, "_prepare_dataloader", lambda dataloader, *_, **__: dataloader)
    accelerator = getattr(trainer, "_accelerator_connector", None)
    if hasattr(accelerator, "use_distributed_sampler"):
        return patched(accelerator, "use_distributed_sampler", False)
    return None


def index_recorder() -> Callable[[Any], Any] | None:
    """What prediction writers look for around a batch sampler; ``None`` if there is no such class."""
    return getattr(overrides, "_IndexBatchSamplerWrapper", None)


def is_new_set_of_loaders(barrier_name: object) -> bool:
    """Whether a barrier of this name comes just before loaders are processed ("train_dataloader()")."""
    return isinstance(barrier_name, str) and barrier_name.endswith("_dataloader()")


# -- Where the loops are


@dataclass(frozen=True)
class LoopProgress:
    """Where the fit loop is.

    Attributes:
        epoch: The epoch that runs, or runs next.
        begun: Batches of it that were begun.
        done: Batches of it that were trained.
        is_last: Whether the last batch read was the epoch's last.
    """

    epoch: int = 0
    begun: int = 0
    done: int = 0
    is_last: bool = False

    def is_over(self, length: float = float("inf")) -> bool:
        """Whether all batches of the epoch were trained: the last one was read, and none is under way."""
        return self.done > 0 and self.begun == self.done and (self.is_last or self.done >= length)


def loop_progress(trainer: pl.Trainer) -> LoopProgress:
    """Read the fit loop's counters. Falls back to the Trainer's public epoch, at its start."""
    try:
        fit_loop: Any = trainer.fit_loop
        batches = fit_loop.epoch_loop.batch_progress
        return LoopProgress(
            epoch=fit_loop.epoch_progress.current.processed,
            begun=batches.current.ready,
            done=batches.current.processed,
            is_last=bool(batches.is_last_batch),
        )
    except AttributeError:
        return LoopProgress(epoch=getattr(trainer, "current_epoch", 0))


def combination_mode(trainer: pl.Trainer) -> str:
    """How several training loaders are combined. Falls back to Lightning's default."""
    combined = getattr(trainer.fit_loop, "_combined_loader", None)
    return str(getattr(combined, "_mode", "max_size_cycle"))


def reload_epoch(trainer: pl.Trainer) -> int:
    """When training loaders were last made anew; -1 if unknown."""
    last = getattr(trainer.fit_loop, "_last_train_dl_reload_epoch", -1)
    return int(last) if last not in (float("inf"), float("-inf")) else -1


def set_reload_epoch(trainer: pl.Trainer, epoch: int) -> None:
    """Go on counting towards the next reload from ``epoch``; without the attribute, from now."""
    if epoch >= 0 and hasattr(trainer.fit_loop, "_last_train_dl_reload_epoch"):
        trainer.fit_loop._last_train_dl_reload_epoch = epoch


# -- Where a resumed run begins


def restore_fit_loop(trainer: pl.Trainer, epoch: int, first_batch: int, length: float) -> bool:
    """Let training begin at ``first_batch`` of ``epoch``, whatever the checkpoint's counters say.

    To be called when training starts: counters are restored by then, and not yet read. Three cases,
    by what Lightning made of its own counters: it still has to end the epoch before; the epoch begins;
    it goes on in the middle.

    Args:
        trainer: Its counters are changed.
        epoch: The epoch to train.
        first_batch: The number, within it, of the next batch.
        length: Batches of an epoch.

    Returns:
        False if the counters are not there; then Lightning's own values stay.
    """
    try:
        fit: Any = trainer.fit_loop
        loop: Any = fit.epoch_loop
        epochs, batches = fit.epoch_progress, loop.batch_progress
        ends_epoch_before = epochs.current.processed == epoch - 1
        saved_in_batch_end = bool(loop.restarted_on_train_batch_end)
    except AttributeError:
        return False
    if ends_epoch_before:
        if length != float("inf"):
            back = 1 if saved_in_batch_end else 0
            _move(batches, int(length), completed=int(length) - back)
        return True
    if first_batch == 0:
        _begin_epoch(fit, loop, epoch, step_unsaid=saved_in_batch_end)
        return True
    _move(epochs, epoch, ready=epoch + 1, started=epoch + 1)
    back = 1 if saved_in_batch_end else 0
    _move(batches, first_batch, completed=first_batch - back)
    batches.is_last_batch = False
    fit.restarting = True
    fit.update_restart_stage()
    return True


def _begin_epoch(fit: Any, loop: Any, epoch: int, *, step_unsaid: bool) -> None:
    """Forget that a checkpoint was loaded: for an iteration-based run Lightning would skip an epoch."""
    if step_unsaid and hasattr(loop, "_batches_that_stepped"):
        loop._batches_that_stepped += 1  # as Lightning itself does on such a restart
    _move(fit.epoch_progress, epoch)
    _move(loop.batch_progress, 0)
    loop.batch_progress.is_last_batch = False
    for each in (fit, loop, getattr(loop, "val_loop", None)):
        if each is not None:
            each._restarting = False
            each.reset_restart_stage()


def _move(progress: Any, value: int, **others: int) -> None:
    """Set the current counters to ``value`` (or to ``others``), and the totals by the same difference."""
    for name in ("ready", "started", "processed", "completed"):
        target = others.get(name, value)
        difference = target - getattr(progress.current, name)
        setattr(progress.total, name, getattr(progress.total, name) + difference)
        setattr(progress.current, name, target)


# -- What a checkpoint of Lightning holds


def saved_progress(checkpoint: Mapping[str, Any]) -> LoopProgress | None:
    """Read the fit loop's counters out of a checkpoint; ``None`` if it holds none."""
    try:
        state = checkpoint["loops"]["fit_loop"]
        epochs = state["epoch_progress"]["current"]
        batches = state["epoch_loop.batch_progress"]
        return LoopProgress(
            epoch=int(epochs["processed"]),
            begun=int(batches["current"]["ready"]),
            done=int(batches["current"]["processed"]),
            is_last=bool(batches["is_last_batch"]),
        )
    except (KeyError, TypeError):
        return None


def _where_loader_states_are(checkpoint: Mapping[str, Any]) -> MutableMapping[str, Any]:
    holder = (checkpoint.get("loops", {}).get("fit_loop") or {}).get("state_dict")
    return holder if isinstance(holder, MutableMapping) else {}


def take_loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """Remove the states of stateful training loaders from a checkpoint and return them, in order."""
    return list(_where_loader_states_are(checkpoint).pop("combined_loader", []))


def put_loader_states(checkpoint: Mapping[str, Any], states: Iterable[Any]) -> None:
    """Put states back where Lightning's ``ddp`` looks for them; nothing if there are none."""
    if found := list(states):
        _where_loader_states_are(checkpoint)["combined_loader"] = found


# -- Predictions


def predictions(trainer: pl.Trainer) -> list[list[Any]] | None:
    """The lists that ``trainer.predict`` is about to return, by loader, to be changed in place."""
    lists = getattr(trainer.predict_loop, "_predictions", None)
    return lists if isinstance(lists, list) else None
