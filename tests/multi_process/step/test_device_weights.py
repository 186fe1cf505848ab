"""Weights that the host must not read: the same steps as those that it reads."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.parity import as_bytes
from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = pytest.mark.multi_process


class Counted(pl.LightningModule):
    """``counts(rank, batch)`` says how many of a batch's rows count; 0 / 0 where none does."""

    def __init__(self, counts, as_tensor):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.counts, self.as_tensor = counts, as_tensor

    def training_step(self, batch, batch_idx):
        rows = batch.to(self.layer[0].weight.dtype)
        count, weight = self.counts(self.global_rank, batch_idx)
        there = torch.arange(len(rows)) < count
        loss = (self.layer(rows).square().flatten() * there).sum() / there.sum()
        weight = torch.tensor(weight, dtype=torch.float64) if self.as_tensor else weight
        return {"loss": loss, "loss_weight": weight}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)  # momentum tells None from zero


def _train(rank, world_size, port, runs):
    found = []
    for counts, as_tensor, deferred, settings in runs:
        strategy = lean()
        strategy._engine.host_reads_are_free = not deferred
        module = Counted(counts, as_tensor)
        runner = trainer(world_size, port, strategy, **settings)
        runner.fit(module, DataLoader(Rows(), batch_size=4))
        found.append([p.detach() for p in module.parameters()])
    return [[(as_bytes(p), p) for p in parameters] for parameters in found]


def _uneven(rank, batch):
    count = [[3, 1], [2, 0], [0, 0], [4, 2]][batch % 4][rank % 2]
    return count, float(count)


def test_a_rank_whose_mean_is_over_nothing():
    runs = [(_uneven, as_tensor, deferred, {}) for as_tensor in (0, 1) for deferred in (0, 1)]
    first, *others = ranks(_train, 2, runs)[0]
    assert all(p.isfinite().all() for _, p in first)
    for other in others:
        for (_, p), (_, q) in zip(first, other, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true", "64-true"])
def test_weights_that_are_equal_change_no_bit(precision):
    def equal(weight):
        return lambda _rank, _batch: (4, weight)

    settings = {"precision": precision}
    runs = [(equal(1.0), False, False, settings)]  # the same loss, which weighs nothing
    for weight in (7e4, 0.1):
        for as_tensor, deferred in ((False, False), (False, True), (True, True)):
            runs.append((equal(weight), as_tensor, deferred, settings))
    first, *others = ranks(_train, 3, runs)[0]
    for other in others:
        assert [data for data, _ in other] == [data for data, _ in first]
