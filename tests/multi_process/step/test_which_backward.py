"""Which backward is averaged: the one that Lightning runs for a step, none that a user runs elsewhere."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = pytest.mark.multi_process
BATCH, STEPS = 2, 4


class Net(pl.LightningModule):
    """Least squares; ``inner`` is what it does besides, in a hook of that name."""

    def __init__(self, inner="", automatic=True):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(6, 1).double()
        self.inner = inner
        self.automatic_optimization = automatic
        self.inner_backwards = 0

    def loss(self, x):
        return self.net(x).square().mean()

    def own(self, x, times):
        """Backwards of the user's own, of which nothing may be seen in training."""
        grads = [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]
        with torch.enable_grad():
            for _ in range(times):
                self.loss(x).backward()
                self.inner_backwards += 1
        for p, grad in zip(self.net.parameters(), grads, strict=True):
            p.grad = grad

    def training_step(self, batch, i):
        if self.inner == "training_step":
            self.own(batch, 1 + 2 * self.global_rank)  # other numbers on each rank
        return self.loss(batch)

    def on_after_backward(self):
        if self.inner == "on_after_backward" and self.global_rank == 0:
            self.own(torch.ones(1, 6, dtype=torch.float64), 1)

    def on_train_epoch_end(self):
        if self.inner == "on_train_epoch_end" and self.global_rank == 0:
            self.own(torch.ones(1, 6, dtype=torch.float64), 2)

    def validation_step(self, batch, i):
        if self.inner == "validation_step":
            self.own(batch, 1 + self.global_rank)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Skipping(Net):
    """Steps at every second batch, and else runs the closure alone."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class NoSync(Net):
    """Accumulates by hand with what public code asks a ``DDPStrategy`` for."""

    def training_step(self, batch, i):
        if i % 2 == 0:
            with self.trainer.model.no_sync():
                self.manual_backward(self.loss(batch) / 2)
            return
        self.manual_backward(self.loss(batch) / 2)
        self.optimizers().step()
        self.optimizers().zero_grad()


def _fit(rank, world_size, port, make, deferred, options):
    strategy = lean(**options)
    strategy._engine.host_reads_are_free = not deferred
    module = make()
    loader = DataLoader(Rows(BATCH * STEPS * world_size), batch_size=BATCH)
    t = trainer(world_size, port, strategy, max_epochs=2, inference_mode=False)
    t.fit(module, loader, loader)
    assert not hasattr(type(module), "no_sync"), "what was offered is taken away again"
    return module.net.weight.detach().tolist(), module.inner_backwards


def expected(world_size, step_at=lambda i: True, together=1):
    """Weights of one process: ``together`` batches of all ranks make one step."""
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rows = Rows(BATCH * STEPS * world_size).rows
    size = BATCH * world_size * together
    for _ in range(2):
        for i, start in enumerate(range(0, len(rows), size)):
            optimizer.zero_grad()
            module.loss(rows[start : start + size]).backward()
            if step_at(i):
                optimizer.step()
    return module.net.weight.detach()


PLACES = ["training_step", "on_after_backward", "on_train_epoch_end", "validation_step"]


@pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])
@pytest.mark.parametrize("inner", PLACES)
def test_backwards_of_the_user_stay_on_their_rank(inner, deferred):
    options = {"shared_memory": not deferred}
    results = ranks(_fit, 2, lambda: Net(inner), deferred, options)
    for weights, _ in results:
        torch.testing.assert_close(torch.tensor(weights), expected(2).float(), rtol=1e-6, atol=1e-7)
    assert results[0][1] != results[1][1], "the ranks made different numbers of them"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_window_ends_though_its_module_declines_to_step(world_size):
    for weights, _ in ranks(_fit, world_size, Skipping, False, {}):
        right = expected(world_size, lambda i: i % 2 == 1)
        torch.testing.assert_close(torch.tensor(weights), right.float(), rtol=1e-6, atol=1e-7)


def test_no_sync_of_the_trainers_model_accumulates():
    for weights, _ in ranks(_fit, 2, lambda: NoSync(automatic=False), False, {}):
        right = expected(2, together=2).float()
        torch.testing.assert_close(torch.tensor(weights), right, rtol=1e-6, atol=1e-7)


def test_control_a_backward_that_is_averaged_is_seen():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(expected(2), expected(2, together=2))
