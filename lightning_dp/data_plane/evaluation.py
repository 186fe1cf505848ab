"""Loaders for validation, test and prediction: each sample once, and the ranks' results together again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp.data.eval_batches import EvalBatches
from lightning_dp.data.loader import (
    LoaderParts,
    ShardedBatchSampler,
    copy_loader,
    give_batches,
)
from lightning_dp.data.share import Cursor
from lightning_dp.data.stream import StreamBatches
from lightning_dp.data.train_batches import TrainBatches
from lightning_dp.data_plane import gather
from lightning_dp.data_plane.common import Ranks
from lightning_dp.data_plane.streams import prepare_stream
from lightning_dp.errors import ConfigError, UnevenShardError
from lightning_dp.internals import loaders as loader_seams
from lightning_dp.internals.collectives import collectives_checked
from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)


class EvaluationData:
    """The loaders of ``validate`` (also inside ``fit``), ``test`` and ``predict``.

    Args:
        ranks: Who shares the data, and how.
        trainer: Whose loops run.
    """

    def __init__(self, ranks: Ranks, trainer: pl.Trainer) -> None:
        self._ranks = ranks
        self._trainer = trainer
        self._sets: dict[str, list[ShardedBatchSampler | None]] = {}
        self._in_step = False
        self._said_padding = self._warned_metrics = False

    # Loaders

    def begin_set(self, stage: str) -> None:
        """Forget the loaders of ``stage`` so far: new ones are about to come."""
        self._sets[stage] = []

    def process(self, loader: Any, stage: str) -> Any:
        """Return what Lightning should iterate over in the place of ``loader``.

        Args:
            loader: The user's.
            stage: ``"validate"``, ``"test"`` or ``"predict"``.

        Collective: every rank, for each loader in turn. Blocks.
        """
        predicts = stage == "predict"
        batches = None
        if self._ranks.shards(loader):
            batches = self._batches(loader, predicts)
            result = give_batches(batches, loader_seams.index_recorder() if predicts else None)
        else:
            result = prepare_stream(loader, self._ranks, lambda: 0, 1, training=False)
            if predicts:
                result = _recording(result)
        self._sets.setdefault(stage, []).append(batches)
        return result

    def _batches(self, loader: DataLoader[Any], predicts: bool) -> ShardedBatchSampler:
        ranks = self._ranks
        epoch = loader_seams.loop_progress(self._trainer).epoch
        parts = ranks.parts(loader, training=False)
        if parts.source.length is None:
            return StreamBatches(parts, ranks.shard, Cursor(epoch), training=False)
        if ranks.options.eval_padding == "pad" and not predicts:
            return TrainBatches(parts, ranks.shard, Cursor(epoch), agree=ranks.agree)
        batches = EvalBatches(
            parts, ranks.shard, epoch=epoch, idle_repeats=not predicts, agree=ranks.agree
        )
        if not batches.is_exact:
            self._say_small(parts, batches.total)
        return batches

    def _say_small(self, parts: LoaderParts, total: int) -> None:
        ranks = self._ranks.world_size
        self._ranks.warn_or_raise(
            f"there are {total} {'batches' if parts.source.batches else 'samples'} to evaluate on {ranks}"
            f" ranks. A rank without one evaluates a sample of another rank again, because metrics are"
            f" reduced over ranks that have made a step: metrics count {ranks - total} sample(s) twice."
            " Use at most as many ranks as samples for an exact value."
        )

    # What the ranks' shares are like

    def _current(self) -> list[ShardedBatchSampler | None]:
        stage = stage_of(self._trainer)
        return self._sets.get(stage, self._sets.get("validate", []))

    @property
    def _is_even(self) -> bool:
        return all(each is None or each.is_even for each in self._current())

    @property
    def _may_be_ragged(self) -> bool:
        """Whether any share seen so far differs between ranks, so that gathered tensors may too."""
        return any(
            each is None or each.is_ragged or not each.is_exact
            for loaders in self._sets.values()
            for each in loaders
        )

    # Collectives of users

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around ``validation_step`` and ``test_step``: refuse collectives in uneven numbers of steps.

        Metrics that synchronise in each step (``dist_sync_on_step``) do so only at the epoch's end then.
        """
        self._in_step = True
        try:
            if self._is_even:
                yield
            else:
                with self._local_metrics(), collectives_checked(self.check_step):
                    yield
        finally:
            self._in_step = False

    @contextmanager
    def _local_metrics(self) -> Iterator[None]:
        modules = self._trainer.lightning_module.modules()
        metrics = [each for each in modules if getattr(each, "dist_sync_on_step", None) is True]
        if metrics and not self._warned_metrics:
            self._warned_metrics = True
            if self._ranks.shard.rank == 0:
                log.warning(
                    "lean_ddp: the ranks make different numbers of %s steps: with dist_sync_on_step=True"
                    " %s shows each rank's own value in a step; its value of the epoch is that of all.",
                    stage_of(self._trainer),
                    type(metrics[0]).__name__,
                )
        for metric in metrics:
            vars(metric)["dist_sync_on_step"] = False
        try:
            yield
        finally:
            for metric in metrics:
                vars(metric)["dist_sync_on_step"] = True

    def check_step(self, what: str) -> None:
        """Refuse a collective in a step that not all ranks make.

        Raises:
            UnevenShardError: On every rank, at the first step: all of them make that one.
        """
        if not self._in_step or self._is_even:
            return
        raise UnevenShardError(
            f"{what} was called inside {stage_of(self._trainer)}_step, but the ranks make different"
            " numbers of steps here: some would wait for ever. With a batch size of 1, or fewer samples"
            " than ranks, the numbers differ by one. Log with on_step=False, on_epoch=True, gather and"
            " compute metrics in the epoch-end hook, use a larger batch, or choose"
            " eval_padding='pad'."
        )

    def padded(self, tensor: Tensor, group: Any, *, sync_grads: bool) -> Tensor:
        """Return ``tensor`` padded with zeros to the largest of all ranks.

        Collective: every rank. Blocks. Nothing is sent where all shares are equal.
        """
        ranks = self._ranks
        if sync_grads or ranks.world_size == 1 or not self._may_be_ragged:
            return tensor
        result, shapes = gather.pad_to_largest(tensor, gather.members(group, ranks.group))
        if len(set(shapes)) > 1 and not self._said_padding:
            self._said_padding = True
            if ranks.shard.rank == 0:
                log.warning(
                    "lean_ddp: all_gather of different shapes (%s by rank): padded with zeros to the"
                    " largest. strategy.gather_ragged(rows) returns exactly the rows there are, in the"
                    " order of the dataset.",
                    [tuple(shape) for shape in shapes],
                )
        return result

    def gather_ragged(self, rows: Tensor, dataloader_idx: int) -> Tensor:
        """Return the rows of all ranks in the order of the dataset, each once.

        Raises:
            ConfigError: On every rank, if a rank has more rows than samples.

        Collective: every rank. Blocks.
        """
        loaders = self._current()
        batches = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        group = self._ranks.group
        indices: list[Any] = []
        if isinstance(batches, (EvalBatches, TrainBatches)):
            for batch in batches.local_batches():
                if len(indices) >= len(rows):
                    break
                indices += batch
            counts = group.all_gather_object((len(rows), len(indices)))
            if any(have > samples for have, samples in counts):
                raise ConfigError(
                    "gather_ragged needs one row for each sample, in the order in which they came; (rows,"
                    f" samples) by rank: {counts}."
                )
        return gather.gather_rows(rows, indices[: len(rows)], group)

    # Prediction

    def merge_predictions(self) -> None:
        """Give every rank all predictions, batch by batch in the order of the dataset.

        Collective: every rank. Blocks. Sends all predictions to all ranks.
        """
        lists = loader_seams.predictions(self._trainer)
        if lists is None:
            return
        for number, batches in enumerate(self._sets.get("predict", [])):
            if number < len(lists):
                indices = None
                if isinstance(batches, EvalBatches):
                    indices = list(batches.local_batches(len(lists[number])))
                lists[number][:] = gather.merge_batches(lists[number], indices, self._ranks.group)


def stage_of(trainer: pl.Trainer) -> str:
    """``"train"``, ``"validate"``, ``"test"`` or ``"predict"``; a sanity check validates."""
    stage = getattr(trainer.state.stage, "value", None)
    return "validate" if stage == "sanity_check" else str(stage)


def _recording(loader: Any) -> Any:
    """Record the indices of a loader that the user shards, for prediction writers."""
    recorder = loader_seams.index_recorder()
    batch_sampler = getattr(loader, "batch_sampler", None)
    if (
        recorder is None
        or not isinstance(loader, DataLoader)
        or isinstance(batch_sampler, recorder)  # type: ignore[arg-type]
        or not hasattr(batch_sampler, "__dict__")
    ):
        return loader
    return copy_loader(loader, batch_sampler=recorder(batch_sampler))
