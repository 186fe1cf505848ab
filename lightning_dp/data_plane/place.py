"""When training starts: let Lightning's counters say what the data does, and tell the user."""

from __future__ import annotations

import logging

from lightning_dp.data.train_batches import TrainBatches
from lightning_dp.data_plane.resume import Resume
from lightning_dp.data_plane.training import TrainingData
from lightning_dp.internals import loaders as loader_seams

log = logging.getLogger(__name__)


def place(training: TrainingData) -> None:
    """Move the fit loop to where the data goes on. Local: every rank computes the same."""
    resume, trainer = training.resume, training.trainer
    if resume is None:
        return
    length = trainer.num_training_batches
    if resume.state is not None:
        loader_seams.set_reload_epoch(trainer, resume.state.reload_epoch)
    first = 0 if training.restarts else _first_batch(training, resume)
    first = min(first, int(length)) if length != float("inf") else first
    if loader_seams.place_fit_loop(trainer, resume.epoch, first, length):
        for entry in training.entries:
            if entry.batches is not None and not entry.keeps_place:
                entry.batches.begins_at = first
    if training.ranks.shard.rank == 0:
        _tell(training, resume, first)


def _first_batch(training: TrainingData, resume: Resume) -> int:
    """The number of the epoch's next batch, from the loader that decides where the epoch ends."""
    batches = [entry.batches for entry in training.entries if entry.batches is not None]
    if not batches or any(entry.keeps_place for entry in training.entries):
        return resume.batches
    sized = [(len(each), each.first_batch) for each in batches if isinstance(each, TrainBatches)]
    if not sized:
        return batches[0].first_batch
    decides = min if loader_seams.combination_mode(training.trainer) == "min_size" else max
    return decides(sized)[1]


def _tell(training: TrainingData, resume: Resume, first: int) -> None:
    ranks = training.ranks.world_size
    if resume.state is None:
        log.info(
            "lean_ddp: the checkpoint has no data state; its counters are taken for those of %d rank(s)"
            " with this batch size: epoch %d goes on at batch %d.",
            ranks,
            resume.epoch,
            first,
        )
        return
    before, now = resume.state.effective_batch(), training.effective_batch
    if before and now and before != now:
        log.warning(
            "lean_ddp: an optimizer step had %d samples (%d rank(s)) and now has %d (%d rank(s)). Each"
            " remaining sample is still trained once, but epochs have %s batches a rank now, and a"
            " learning-rate schedule counted in steps covers another number of samples.",
            before,
            resume.state.world_size,
            now,
            ranks,
            training.trainer.num_training_batches,
        )


def tell_batch_size(training: TrainingData) -> None:
    """Say once what one optimizer step consists of."""
    trainer, ranks = training.trainer, training.ranks
    batches = training.entries[0].batches if training.entries else None
    if batches is None or ranks.shard.rank != 0:
        return
    unit = "batches of the batch sampler" if batches.parts.source.batches else "samples"
    log.info(
        "lean_ddp: %d x %d rank(s) x %d micro-batch(es) = %d %s per optimizer step.",
        batches.batch_size,
        ranks.world_size,
        trainer.accumulate_grad_batches,
        training.effective_batch,
        unit,
    )
    overfit = getattr(trainer, "overfit_batches", 0)
    if isinstance(overfit, int) and overfit > 0 and ranks.world_size > 1:
        log.info(
            "lean_ddp: overfit_batches=%d counts for each rank: %d batches in all.",
            overfit,
            overfit * ranks.world_size,
        )
