"""What a checkpoint gets: the data state, from wherever in the Trainer's life it is written."""

from __future__ import annotations

import logging
from typing import Any

from lightning_dp.data.share import Cursor
from lightning_dp.data.state import DataState, LoaderState
from lightning_dp.data.train_batches import TrainBatches
from lightning_dp.data_plane.resume import unit_of
from lightning_dp.data_plane.training import Entry, TrainingData
from lightning_dp.internals import loaders as loader_seams
from lightning_dp.internals import trainer as trainer_seams

log = logging.getLogger(__name__)


def save(training: TrainingData, checkpoint: dict[str, Any], waiting: int) -> None:
    """Put the data state into ``checkpoint["lean_ddp"]["data"]``.

    If the checkpoint holds the partial gradients of an unfinished accumulation window (an entry
    ``checkpoint["lean_ddp"]["window"]``), the state is that of the last micro-batch. If it does not, the
    batches since the last optimizer step count as not trained: they come again on resume.

    Args:
        training: The loaders.
        checkpoint: About to be written.
        waiting: Micro-batches that wait for their optimizer step, the running one included.

    Collective: every rank if a training loader is stateful, unless training is failing or over.
    """
    ours = checkpoint.setdefault("lean_ddp", {})
    epoch, batches = _where(training)
    unfinished = 0 if ours.get("window") else _unfinished(training, waiting)
    rewind = min(batches, unfinished)
    training.progress.rewind = rewind
    try:
        states = _loader_states(training, checkpoint, rewind)
    finally:
        training.progress.rewind = 0
    trainer, ranks = training.trainer, training.ranks
    ours["data"] = DataState(
        epoch=epoch,
        seed=ranks.shard.seed,
        world_size=ranks.world_size,
        accumulate=trainer.accumulate_grad_batches,
        batches=batches - rewind,
        loaders=tuple(
            _loader(training, each, epoch, batches - rewind) for each in training.entries
        ),
        loader_states=states,
        reload_epoch=loader_seams.reload_epoch(trainer),
    ).to_checkpoint()
    if unfinished and ranks.shard.rank == 0:
        _tell(rewind, lost=unfinished - rewind)


def _tell(rewind: int, lost: int) -> None:
    log.info(
        "lean_ddp: the checkpoint lies inside an accumulation window whose gradients it does not hold; on"
        " resume, %d batch(es) of each rank are trained again%s.",
        rewind,
        f", and {lost} of the epoch before are not" if lost else "",
    )


def _where(training: TrainingData) -> tuple[int, int]:
    """The epoch to go on with, and how many batches of it each rank has trained."""
    progress = training.progress
    if progress.epoch is None:  # nothing was trained on these loaders
        resume = training.resume
        if resume is not None:
            return resume.epoch, 0 if training.restarts else resume.batches
        return training.current_epoch(), 0
    if training.current_epoch() != progress.epoch:  # another epoch has begun, none of its batches
        return training.current_epoch(), 0
    at = loader_seams.position(training.trainer)
    if at.is_over(training.trainer.num_training_batches):
        return progress.epoch + 1, 0
    return progress.epoch, at.done


def _unfinished(training: TrainingData, waiting: int) -> int:
    """Batches that were trained since the last optimizer step."""
    if training.progress.epoch is None:
        return 0
    at = loader_seams.position(training.trainer)
    return max(0, waiting - (at.begun - at.done))


def _loader(training: TrainingData, entry: Entry, epoch: int, batches: int) -> LoaderState:
    made = entry.batches
    if made is None:
        return LoaderState()
    fresh = training.progress.epoch is None and not entry.keeps_place
    at = made.start if fresh else made.cursor_after(epoch, batches)
    if at.epoch != epoch:
        at = Cursor(epoch)
    total, order_hash = made.parts.source.length or 0, 0
    if isinstance(made, TrainBatches):
        mode = loader_seams.combination_mode(training.trainer)
        first_pass = made.start.pass_index if epoch == made.start.epoch else 0
        if mode == "max_size" and at.pass_index > first_pass:  # exhausted, and not begun again
            at = Cursor(epoch, first_pass, made.total)
        order_hash = made.hash_of(at)
    return LoaderState(
        unit_of(made.parts), total, made.batch_size, at.pass_index, at.consumed, order_hash
    )


def _loader_states(
    training: TrainingData, checkpoint: dict[str, Any], rewind: int
) -> tuple[dict[int, Any], ...]:
    """Collect what stateful loaders say, from all ranks; Lightning would keep rank 0's only."""
    loader_seams.take_loader_states(checkpoint)
    if not any(entry.stateful for entry in training.entries):
        return ()
    # A loader of ours can go back by itself; its own state cannot.
    told = {
        number: entry.loader.state_dict()
        for number, entry in enumerate(training.entries)
        if entry.stateful and not (rewind and entry.batches is not None)
    }
    loader_seams.put_loader_states(checkpoint, told.values())
    if training.final_states is not None:
        return training.final_states
    group = training.ranks.group
    if group.world_size > 1 and trainer_seams.is_unwinding(training.trainer):
        return ()  # the others may not come
    return tuple(group.all_gather_object(told))


def end(training: TrainingData) -> None:
    """Keep what stateful loaders say, for checkpoints after training: the ranks meet no more then.

    Collective: every rank if a training loader is stateful.
    """
    training.final_states = _loader_states(training, {}, 0)
