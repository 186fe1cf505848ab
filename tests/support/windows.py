"""Modules for accumulation windows: a gradient of 1 a micro-batch, and a mean over tokens."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.trainers import lean, trainer


class Unit(pl.LightningModule):
    """Every micro-batch's gradient is 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.w * 1.0

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.w.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Tokens(pl.LightningModule):
    """A token-mean loss over rows of very different length; float64."""

    def __init__(self, rows, lr=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.rows = rows
        self.lr = lr
        self.gradients = []
        self.losses = []

    def loss(self, rows):
        return torch.cat([self.net(row).flatten() for row in rows]).square().mean()

    def training_step(self, batch, batch_idx):
        rows = [self.rows[int(i)] for i in batch]
        return {"loss": self.loss(rows), "loss_weight": sum(len(row) for row in rows)}

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append([p.grad.clone() for p in self.parameters()])
        totals = getattr(self.trainer.strategy, "window_totals", None)
        self.losses.append(totals.loss if totals is not None else None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_rows(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in lengths]


class InOrder(torch.utils.data.Sampler):
    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def fit_tokens(world_size, rank, port, rows, window, options=None, steps=None, **kwargs):
    """Each rank reads rows rank, rank + W, ...: the sampling of data is not under test here."""
    module = Tokens(rows)
    mine = list(range(rank, len(rows), world_size))
    data = DataLoader(range(len(rows)), batch_size=1, sampler=InOrder(mine))
    strategy = kwargs.pop("strategy", None) or lean(**(options or {}))
    t = trainer(
        world_size,
        port,
        strategy,
        accumulate_grad_batches=window,
        use_distributed_sampler=False,
        **kwargs,
    )
    t.fit(module, data)
    return module
