"""The best checkpoint's path, which each rank makes of the value that it monitors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)


def compare_best_paths(trainer: pl.Trainer, gather: Callable[[Any], list[Any]]) -> None:
    """Say if a rank's ``best_model_path`` is not rank 0's, the only one that was written.

    Args:
        trainer: After its last save.
        gather: Returns every rank's object.

    Collective: every rank, if the Trainer saves checkpoints. Blocks.
    """
    callback = trainer.checkpoint_callback
    if callback is None:
        return
    paths = gather(str(getattr(callback, "best_model_path", "")))
    ranks = [rank for rank, path in enumerate(paths) if path != paths[0]]
    if ranks and trainer.is_global_zero:
        log.warning(
            "lean_ddp: the best checkpoint is %r on rank 0 and %r on rank %d; rank(s) %s look for a"
            " file that nobody wrote. Each monitored its own value of %r: log it with"
            " `self.log(..., sync_dist=True)`.",
            paths[0],
            paths[ranks[0]],
            ranks[0],
            ranks,
            getattr(callback, "monitor", None),
        )
