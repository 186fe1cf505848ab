"""Several optimizers, closures, a synchronised BatchNorm and refusals, with a Trainer."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lightning_dp.engine.replicas.sync_batch_norm import Synced
from lightning_dp.errors import ConfigError
from tests.support import grounds
from tests.support.modules import Base
from tests.support.ranks import both_worlds
from tests.support.spies import CollectiveSpy
from tests.support.trainers import fit, lean, ranks, same_weights

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# Several optimizers, LBFGS, a synchronised BatchNorm, refusals.


class Several(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.backbone.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(self.head.parameters(), lr=0.2),
        ]


@both_worlds
@pytest.mark.parametrize("manual_sync", ["each_backward", "on_step"])
def test_several_optimizers(world_size, manual_sync):
    same_weights(Several, world_size, {"manual_sync": manual_sync})


class Closures(Base):
    """Each rank returns a loss of its own; the search for a step, and its end, need one of all ranks."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.LBFGS(
            self.parameters(), max_iter=6, line_search_fn="strong_wolfe", tolerance_change=1e-3
        )


class ManualClosures(Closures):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@both_worlds
@pytest.mark.parametrize("module", [Closures, ManualClosures])
def test_lbfgs_calls_its_closure_many_times(world_size, module):
    same_weights(module, world_size, tolerance=1e-6)


class Normed(Base):
    def __init__(self):
        super().__init__()
        self.backbone.insert(1, nn.BatchNorm1d(8).double())


@both_worlds
def test_sync_batchnorm(world_size):
    def check(module, trainer):  # Lightning's own plugin, on a GPU, gives back a class of its own
        own = nn.BatchNorm1d if grounds.CURRENT is grounds.CPU else nn.modules.batchnorm._BatchNorm
        assert isinstance(module.backbone[1], own), "reverted after fit"
        assert not isinstance(module.backbone[1], (nn.SyncBatchNorm, Synced))

    same_weights(Normed, world_size, sync_batchnorm=True, check=check, buffers=True)


def test_control_without_sync_batchnorm_it_is_another_model():
    with pytest.raises(AssertionError, match="not close"):
        same_weights(Normed, 2, buffers=True)


class Lazy(Base):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(2)


def _lazy(rank, world_size, port):
    with pytest.raises(ConfigError, match="lazy") as caught:
        fit(Lazy(), rank, world_size, port, lean())
    assert "head.weight" in str(caught.value)


def test_lazy_parameters_are_refused_by_name():
    ranks(_lazy, 2)


def _forward_is_silent(rank, world_size, port):
    spy = CollectiveSpy()

    class Spied(Normed):
        def training_step(self, batch, batch_idx):
            with spy.expecting():
                return super().training_step(batch, batch_idx)

    fit(Spied(), rank, world_size, port, lean())


def test_no_collective_in_training_step():
    ranks(_forward_is_silent, 2)


def test_nothing_of_a_run_is_left():
    def run(rank, world_size, port):
        module = Base()
        fit(module, rank, world_size, port, lean())
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        assert threading.active_count() < 8

    ranks(run, 2)
