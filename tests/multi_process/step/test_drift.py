"""Replicas that drift apart behind the Trainer's back: an error on all ranks, by the end of the epoch."""

from __future__ import annotations

import logging

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_dp.errors import ReplicaMismatchError
from tests.support.modules import Base
from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class Plateau(Base):
    """Its scheduler follows a value that rises on rank 1 only."""

    def __init__(self, sync_dist=False):
        super().__init__()
        self.sync_dist = sync_dist

    def validation_step(self, batch, batch_idx):
        rising = self.current_epoch * (1.0 if self.global_rank else -1.0)
        self.log("val", torch.tensor(rising), sync_dist=self.sync_dist)

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(sgd, patience=0)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class RawStep(Base):
    """Manual optimization with the optimizer itself, which averages nothing in ``on_step``."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        sgd = self.optimizers(use_pl_optimizer=False)
        sgd.zero_grad()
        self.manual_backward(self.loss(batch))
        sgd.step()


class StepsInBackward(Base):
    """As optimizers do that are fused into the backward."""

    def on_fit_start(self):
        for p in self.parameters():
            p.register_hook(lambda g, p=p: p.data.sub_(0.1 * g))


def _fit(rank, world_size, port, make, options, epochs=3):
    module = make()
    loaders = {"train_dataloaders": DataLoader(Rows(), batch_size=6)}
    if "validation_step" in vars(type(module)):
        loaders["val_dataloaders"] = DataLoader(Rows(12), batch_size=6)
    running = trainer(world_size, port, lean(**options), max_epochs=epochs, num_sanity_val_steps=0)
    try:
        running.fit(module, **loaders)
    except ReplicaMismatchError as error:
        return str(error), error.ranks, running.current_epoch
    return None


def test_a_scheduler_that_follows_one_ranks_own_value_is_an_error_with_the_remedy():
    found = ranks(_fit, 2, Plateau, {}, 4)
    for rank, (message, differing, epoch) in enumerate(found):
        assert f"[rank {rank}]" in message
        assert "'lr of optimizer 0 (SGD), group 0'" in message
        assert "0: 0.1, 1: 0.01" in message
        assert "sync_dist=True" in message
        assert differing == (1,)
        assert epoch == 2, "after the validation in which it happened, before the next batch"


def test_it_is_none_with_the_remedy_nor_where_nobody_looks():
    assert ranks(_fit, 2, lambda: Plateau(sync_dist=True), {}, 4) == [None, None]
    assert ranks(_fit, 2, Plateau, {"check_replicas_every_n_steps": 0}, 4) == [None, None]


DRIFTS = {
    "a raw optimizer in on_step": (RawStep, {"manual_sync": "on_step"}),
    "an optimizer in the backward": (StepsInBackward, {}),
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("what", DRIFTS)
def test_steps_behind_the_trainers_back_are_seen_by_the_end_of_the_epoch(what, epochs):
    make, options = DRIFTS[what]
    for message, differing, epoch in ranks(_fit, 2, make, options, epochs):
        assert "the values differ" in message
        assert differing == (1,)
        assert epoch <= 1
    silent = {**options, "check_replicas_every_n_steps": 0}
    assert ranks(_fit, 2, make, silent, epochs) == [None, None], "control"


class Monitored(Plateau):
    """The best value of rank 1, which is part of the file's name, is not rank 0's."""

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.tensor(1.0 + self.global_rank), sync_dist=self.sync_dist)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _best(rank, world_size, port, root, sync_dist):
    saves = ModelCheckpoint(dirpath=root, monitor="val", filename="{epoch}-{val:.2f}")
    running = trainer(
        world_size,
        port,
        lean(),
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[saves],
        enable_checkpointing=True,
    )
    seen = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("lightning_dp").addHandler(handler)
    loader = DataLoader(Rows(12), batch_size=6)
    module = Monitored(sync_dist)
    running.fit(module, loader, loader)
    return [message for message in seen if "best checkpoint" in message]


def test_a_best_path_that_nobody_wrote_is_said(tmp_path):
    first, second = ranks(_best, 2, str(tmp_path / "own"), False)
    assert second == []
    assert len(first) == 1
    assert "rank(s) [1]" in first[0]
    assert "'val'" in first[0]
    assert "sync_dist=True" in first[0]
    assert ranks(_best, 2, str(tmp_path / "agreed"), True) == [[], []], "control"
