"""``DataPlane``: what the strategy delegates to for everything that concerns data."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.data.draw import seed_everywhere
from lightning_dp.data.loader import Shard
from lightning_dp.data.order import mix
from lightning_dp.data_plane import gather
from lightning_dp.data_plane.common import Ranks, log
from lightning_dp.data_plane.evaluation import EvaluationData, stage_of
from lightning_dp.data_plane.exchange import OrderAgreement, open_group
from lightning_dp.data_plane.resume import Resume
from lightning_dp.data_plane.training import TrainingData
from lightning_dp.engine.group import Waiting
from lightning_dp.internals import loaders as loader_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import pl
from lightning_dp.options import DataOptions


class DataPlane:
    """Follows the Trainer's life cycle, from ``connect`` to ``teardown``.

    Args:
        options: Checked options.
        timeout: For the small exchanges between ranks.
        waiting: Registers a wait for other ranks.
    """

    def __init__(self, options: DataOptions, timeout: timedelta | None, waiting: Waiting) -> None:
        self.options = options
        self._timeout = timeout
        self._waiting = waiting
        self._trainer: pl.Trainer | None = None
        self._give_back: Callable[[], None] | None = None
        self._hands_off = False
        self._forget()

    def _forget(self) -> None:
        self._ranks: Ranks | None = None
        self._resume: Resume | None = None
        self._training: TrainingData | None = None
        self._evaluation: EvaluationData | None = None

    # Life time

    def connect(self, module: pl.LightningModule) -> None:
        """Take sampling over from the Trainer, before it looks at any loader. Local."""
        trainer = trainer_seams.attached_trainer(module)
        if trainer is None or self._give_back is not None:
            return
        self._trainer = trainer
        self._hands_off = not loader_seams.user_wants_sharding(trainer)
        self._give_back = loader_seams.take_over_loaders(trainer)
        if self._give_back is None:
            self._hands_off = True
            log.warning(
                "lean_ddp: this version of Lightning keeps the sampling of data to itself; its own rules"
                " apply: evaluation counts some samples twice, and a resumed epoch starts at its head."
            )

    def teardown(self) -> None:
        """Give everything back. Local."""
        if self._give_back is not None:
            self._give_back()
        if self._ranks is not None:
            self._ranks.group.close()
        # A checkpoint may still be written after fit: what it needs stays.
        training = self._training
        self._forget()
        self._training, self._give_back = training, None

    def _open(self) -> Ranks:
        if self._ranks is not None:
            return self._ranks
        assert self._trainer is not None
        options = self.options
        group = open_group(self._timeout, self._waiting)
        own = self._seed()
        seed = int(group.broadcast_object(secrets.randbits(31) if own is None else own))
        # Before the ranks exist somebody may ask how many steps there will be.
        exist = dist.is_initialized()
        world_size = group.world_size if exist else self._trainer.world_size
        ranks = Ranks(
            group=group,
            shard=Shard(group.rank, world_size, seed),
            options=options,
            agree=OrderAgreement(group, strict=options.strict_data),
            hands_off=self._hands_off,
        )
        self._ranks = ranks if exist or world_size == 1 else None
        return ranks

    def _seed(self) -> int | None:
        given = os.environ.get("PL_GLOBAL_SEED")  # what seed_everything leaves, also for ddp
        if given:
            return int(given)
        if self._resume is None:
            return None
        return self._resume.state.seed if self._resume.state is not None else 0  # ddp's default

    # Loaders

    def barrier(self, name: object) -> None:
        """Take note of a barrier. Local.

        [Note: how a set of loaders is announced] Lightning asks for loaders one by one, through
        ``process_dataloader``, and nothing in its hooks says that the first of a new set is next, nor how
        many there are. The barrier that it calls before, by name, is the one public call at that moment.
        Where a version calls it otherwise, training still sees a new set once it has trained on the old.
        """
        if self._trainer is None or not loader_seams.is_new_set_of_loaders(name):
            return
        stage = stage_of(self._trainer)
        if stage == "train":
            self._train_data().begin_set()
        elif self._evaluation is not None:
            self._evaluation.begin_set(stage)

    def process_dataloader(self, loader: Any) -> Any:
        """Return what Lightning should iterate over in the place of ``loader``.

        Collective: every rank, for each loader in turn. Blocks.
        """
        if self._trainer is None:
            return loader
        stage = stage_of(self._trainer)
        if stage == "train":
            return self._train_data().process(loader)
        return self._eval_data().process(loader, stage)

    def _train_data(self) -> TrainingData:
        assert self._trainer is not None
        if self._training is None or self._training.ranks is not self._ranks:
            self._training = TrainingData(self._open(), self._trainer, self._resume)
        return self._training

    def _eval_data(self) -> EvaluationData:
        assert self._trainer is not None
        if self._evaluation is None:
            self._evaluation = EvaluationData(self._open(), self._trainer)
        return self._evaluation

    # Training

    def begin_training(self) -> None:
        """When training starts: restore a resumed run's position, and say what a step consists of."""
        if self._training is None:
            return
        self._training.restore_position()
        self._training.report_batch_size()
        if self.options.rank_rng == "all":
            shard = self._training.ranks.shard
            seed = mix(shard.seed, self._training.current_epoch(), shard.rank)
            seed_everywhere(seed)
            torch.manual_seed(seed)  # accelerators too

    def batch_begins(self) -> None:
        """Count a training batch. Local."""
        if self._training is not None:
            self._training.batch_begins()

    def end_training(self) -> None:
        """When training has ended. Collective: every rank if a training loader is stateful."""
        if self._training is not None:
            self._training.end()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], waiting: int = 0) -> None:
        """Add the data state. After the window's entry, which decides where the state is.

        Args:
            checkpoint: About to be written.
            waiting: Micro-batches that wait for their optimizer step, the running one included. They count
                as trained only if ``checkpoint["lean_ddp"]["window"]`` holds their gradients.

        Collective: every rank if a training loader is stateful, unless training is failing.
        """
        if self._training is not None:
            self._training.save(checkpoint, waiting)

    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Remember where a loaded checkpoint says training is. Local."""
        if self._trainer is not None and stage_of(self._trainer) == "train":
            self._resume = Resume.read(checkpoint)

    # Evaluation

    @contextmanager
    def evaluation_step(self) -> Iterator[None]:
        """Around ``validation_step`` and ``test_step``."""
        if self._evaluation is None:
            yield
            return
        with self._evaluation.step():
            yield

    def reduce(self, tensor: Any, reduce_op: Any, reduce: Callable[[Any], Any]) -> Any:
        """Reduce with ``reduce``; a mean of integers is not rounded.

        Raises:
            UnevenShardError: Inside a step that not all ranks make.

        Collective: every rank. Blocks.
        """
        if self._evaluation is not None:
            self._evaluation.check_step("A reduction (self.log with sync_dist=True?)")
        if not isinstance(tensor, Tensor):
            return tensor
        return gather.reduce_exactly(tensor, reduce_op, reduce)

    def all_gather(self, tensor: Tensor, group: Any, *, sync_grads: bool) -> Tensor:
        """Return every rank's ``tensor``, stacked; padded to one shape where shares are ragged.

        Raises:
            UnevenShardError: Inside a step that not all ranks make.

        Collective: every rank of ``group``. Blocks.
        """
        if self._evaluation is not None:
            self._evaluation.check_step("all_gather")
            tensor = self._evaluation.padded(tensor, group, sync_grads=sync_grads)
        return gather.all_gather(tensor, group, sync_grads=sync_grads)

    def gather_ragged(self, rows: Tensor, dataloader_idx: int) -> Tensor:
        """See ``LeanDDPStrategy.gather_ragged``. Collective: every rank. Blocks."""
        evaluation = self._eval_data()
        evaluation.check_step("gather_ragged")
        return evaluation.gather_ragged(rows, dataloader_idx)

    def predict_ends(self) -> None:
        """Merge predictions, if the user wants that. Collective: every rank. Blocks."""
        if self.options.gather_predictions and self._evaluation is not None:
            self._evaluation.merge_predictions()
