"""On an accelerator the host reads nothing between a forward and its step: counted, in each demo."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.multi_process.step.test_demos import DEMOS
from tests.support.spies import HostReadSpy
from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = pytest.mark.multi_process
LEARNING, STEPS = 20, 20  # buffers are looked at in each of the first steps


class Weighted(pl.LightningModule):
    """Weights on the device, a buffer that training never changes, statistics that it does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        self.register_buffer("table", torch.arange(6.0, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch + self.table).square().mean()
        return {"loss": loss, "loss_weight": (batch > 0).sum()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Curious(Weighted):
    """Control: it reads its loss."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        assert output["loss"].item() >= 0
        return output


def weighted(kind=Weighted):
    return kind(), DataLoader(Rows(480), batch_size=4)


MODULES = {**DEMOS, "weighted": weighted, "curious": lambda: weighted(Curious)}
SETTINGS = {
    "plain": ({}, {}),
    "group": ({"shared_memory": False}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "checked and clipped": ({"check_gradients": "raise"}, {"gradient_clip_val": 1.0}),
    "bf16": ({}, {"precision": "bf16-true"}),
}


class Watch(pl.Callback):
    def __init__(self):
        self.spy = HostReadSpy()
        self.steps = 0

    def on_train_start(self, trainer, module):
        step = trainer.strategy.optimizer_step

        def watched(*args, **kwargs):
            if trainer.global_step < LEARNING:
                return step(*args, **kwargs)
            self.steps += 1
            with self.spy:
                return step(*args, **kwargs)

        trainer.strategy.optimizer_step = watched


def _train(rank, world_size, port, which, setting):
    torch.manual_seed(1)
    module, loader = MODULES[which]()
    options, settings = SETTINGS[setting]
    strategy = lean(bucket_cap_mb=0.002, check_replicas_every_n_steps=0, **options)
    strategy._engine.host_reads_are_free = False
    watch = Watch()
    runner = trainer(
        world_size,
        port,
        strategy,
        max_epochs=-1,
        max_steps=LEARNING + STEPS,
        callbacks=[watch],
        **settings,
    )
    runner.fit(module, loader)
    assert watch.steps >= STEPS
    return dict(watch.spy.places)


@pytest.mark.parametrize(
    ("which", "setting"),
    [(d, s) for d in DEMOS for s in ("plain", "accumulated")] + [("weighted", s) for s in SETTINGS],
)
def test_the_host_reads_nothing_in_a_step(which, setting):
    for places in ranks(_train, 2, which, setting):
        assert not places


def test_control_a_read_in_the_users_step_is_seen():
    places = ranks(_train, 2, "curious", "plain")[0]
    assert sum(places.values()) == STEPS
    assert all("training_step" in place for place in places), places
