"""How far training is: Lightning's counters, read so that hooks at any moment see the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_dp.internals import loaders as loader_seams

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass
class Progress:
    """Counts batches of one rank.

    Attributes:
        trainer: Whose loops count.
        begun: Batches begun since this object exists, in any epoch.
        epoch: The epoch of the last batch that was begun; ``None`` as long as nothing was trained on the
            current loaders.
        rewind: Batches to leave out of what counts as trained: a window whose gradients are not kept.
    """

    trainer: pl.Trainer
    begun: int = 0
    epoch: int | None = None
    rewind: int = 0

    def batch_begins(self, epoch: int) -> None:
        """Count one more batch, of ``epoch``."""
        self.begun += 1
        self.epoch = epoch

    def started(self) -> int | None:
        """Batches begun in the running epoch; ``None`` before the first one of the current loaders."""
        return None if self.epoch is None else loader_seams.position(self.trainer).begun

    def trained(self) -> int:
        """Batches trained since this object exists."""
        if self.epoch is None:
            return self.begun
        now = loader_seams.position(self.trainer)
        return self.begun - (now.begun - now.done) - self.rewind
