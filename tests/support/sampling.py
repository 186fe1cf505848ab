"""A dataset of numbers, a module that notes which ones it saw, and checks of what several ranks saw."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.trainers import lean, trainer


class Numbers(Dataset):
    """Sample ``i`` is ``{"i": i, "x": ..., "y": ...}``, a function of ``i``; notes what was loaded."""

    def __init__(self, n):
        self.n = n
        self.loaded = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.loaded.append(int(index))
        phase = torch.arange(1, 5, dtype=torch.float64) * (index + 1)
        return {
            "i": torch.tensor(int(index)),
            "x": torch.sin(phase),
            "y": torch.cos(phase[:1] * 0.7),
        }


class Learner(pl.LightningModule):
    """Linear regression in float64 that notes ``(epoch, batch_idx, indices, loss)`` of each batch.

    Args:
        loaders: What the ``*_dataloader`` hooks return, by stage; each a function without arguments.
        estimate: Read ``estimated_stepping_batches`` in ``configure_optimizers``.
    """

    def __init__(self, loaders=None, *, estimate=False):
        super().__init__()
        self.net = nn.Linear(4, 1, dtype=torch.float64)
        nn.init.constant_(self.net.weight, 0.1)
        nn.init.zeros_(self.net.bias)
        self.loaders = loaders or {}
        self.estimate = estimate
        self.seen: list[tuple[int, int, Any, float]] = []
        self.evaluated: list[Any] = []
        self.total_steps = None

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def training_step(self, batch, batch_idx):
        parts = batch.values() if "i" not in batch else [batch]
        loss = sum(self.loss(part) for part in parts if part is not None)
        noted = (
            batch["i"].tolist()
            if "i" in batch
            else {k: part["i"].tolist() if part is not None else None for k, part in batch.items()}
        )
        self.seen.append((self.current_epoch, batch_idx, noted, float(loss)))
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch["i"].tolist())
        self.log("mean", batch["i"].double().mean(), sync_dist=True, on_step=False, on_epoch=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return batch["i"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if not self.estimate:
            return optimizer
        self.total_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, int(self.total_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


# Hooks, only where a test gives a loader: Lightning looks at whether they are overridden.
def _hook(stage):
    def hook(self):
        return self.loaders[stage]()

    return hook


class HookLearner(Learner):
    train_dataloader = _hook("train")


class ValHookLearner(HookLearner):
    val_dataloader = _hook("val")


class SaveAt(pl.Callback):
    """Write a checkpoint in one hook, each time it comes, and count them."""

    def __init__(self, folder, hook):
        self.folder, self.count = Path(folder), 0
        setattr(self, hook, self._save)

    def _save(self, trainer, *_):
        if trainer.sanity_checking:
            return
        trainer.save_checkpoint(self.folder / f"{self.count:03d}.ckpt")
        self.count += 1


def fit(rank, world_size, port, module, ckpt_path=None, options=None, loader=None, **kwargs):
    """Fit on this rank; returns the trainer."""
    t = trainer(world_size, port, lean(**(options or {})), **kwargs)
    t.fit(module, loader, ckpt_path=ckpt_path)
    return t


def loader(n, batch_size, workers=0, **kwargs):
    return DataLoader(Numbers(n), batch_size=batch_size, num_workers=workers, **kwargs)


def epochs_of(ranks):
    """Global batches by epoch: ``{epoch: [sorted indices of step 0, of step 1, ...]}``."""
    steps: dict[int, dict[int, list[int]]] = {}
    for seen in ranks:
        for epoch, batch_idx, indices, _ in seen:
            steps.setdefault(epoch, {}).setdefault(batch_idx, []).extend(indices)
    return {
        epoch: [sorted(batches[idx]) for idx in sorted(batches)] for epoch, batches in steps.items()
    }


def counts_of(ranks, epoch):
    """How often each sample was seen in ``epoch``."""
    return Counter(i for seen in ranks for e, _, indices, _ in seen if e == epoch for i in indices)


def losses_of(ranks):
    """The global mean loss of each step, in order: the mean over ranks of equal batches."""
    assert len({len(seen) for seen in ranks}) == 1, "ranks made different numbers of steps"
    return [sum(step[3] for step in steps) / len(steps) for steps in zip(*ranks, strict=True)]
