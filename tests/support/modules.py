"""A LightningModule that tests derive theirs from."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn


class Base(pl.LightningModule):
    """SGD on a loss that subclasses give; every rank's batch is the rows of one global batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, x):
        return self.head(self.backbone(x).tanh())

    def loss(self, x):
        return self(x).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
