"""Several fits on one rank, and checkpoints taken in the middle of a round of ``outer``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from tests.support.parity import as_bytes


def held(module: pl.LightningModule) -> list[Any]:
    """What a rank trains, byte for byte."""
    return [as_bytes(value) for value in module.state_dict().values()]


def again(environment: Mapping[str, str]) -> None:
    """Lightning's environment forgets its variables after a fit."""
    os.environ.update(environment)


class Saves(Callback):
    """Checkpoints after these steps, which change nothing of what the rank trains."""

    def __init__(self, folder: Path | str, steps: Iterable[int]) -> None:
        self.folder, self.steps = folder, [*steps]

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: object
    ) -> None:
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            before = held(module)
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")
            assert held(module) == before
