"""Public reports that need a Trainer, each as a test. A comment says what `ddp` does today.

Weights are compared with those of one process that trains on all ranks' batches, in float64 with SGD.
"""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from tests.support.modules import Base
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import RankError, both_worlds
from tests.support.trainers import ddp, fit, ranks, same_weights

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# a01. ddp: BackboneFinetuning trains another backbone on each rank, silently.


class Finetuned(Base):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@both_worlds
def test_a01_backbone_finetuning(world_size):
    def callbacks():
        return [
            BackboneFinetuning(
                unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.0, backbone_initial_lr=0.1,
                should_align=False, train_bn=True, verbose=False,
            )
        ]  # fmt: skip

    same_weights(Finetuned, world_size, max_epochs=3, callbacks=callbacks)


def test_a01_control_ddp_leaves_the_backbones_different():
    def run(rank, world_size, port):
        module = Finetuned()
        unfreeze = BackboneFinetuning(
            unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.0, should_align=False
        )
        fit(module, rank, world_size, port, ddp(), max_epochs=3, callbacks=lambda: [unfreeze])
        assert_equal_on_all_ranks(dict(module.named_parameters()))

    with pytest.raises(RankError, match="backbone"):
        ranks(run, 2)


# a02. ddp: a plain loss.backward() in manual optimization is never averaged, silently.


class Manual(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


@both_worlds
def test_a02_plain_backward_in_manual_optimization(world_size):
    same_weights(Manual, world_size)


# a04. ddp: parameters added after the start are never averaged, silently.


class Growing(Base):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(5 + self.trainer.global_rank)  # unequal: rank 0's count
            self.extra = nn.Linear(2, 2).double()
            self.trainer.optimizers[0].add_param_group(
                {"params": self.extra.parameters(), "lr": 0.1}
            )
        if self.current_epoch == 2:
            self.head.bias = nn.Parameter(self.head.bias.detach() + 1)
            self.trainer.optimizers[0].param_groups[0]["params"] = [
                *self.backbone.parameters(), *self.head.parameters()
            ]  # fmt: skip

    def loss(self, x):
        y = self(x)
        return (self.extra(y) if hasattr(self, "extra") else y).square().mean()


@both_worlds
def test_a04_layers_added_and_replaced_while_training(world_size):
    same_weights(Growing, world_size, max_epochs=4)


# a05. ddp: a training_step that calls other methods of the module works there; here there is no wrapper.


class OtherMethods(Base):
    def compute_loss(self, x):
        return self.head(self.backbone.forward(x)).square().mean()

    def training_step(self, batch, batch_idx):
        assert type(self.trainer.model) is type(self), "the module is not wrapped"
        return self.compute_loss(batch) + self.trainer.model.head(self.backbone(batch)).mean()


@both_worlds
def test_a05_other_entry_points_than_forward(world_size):
    same_weights(OtherMethods, world_size)


# b09. ddp: Lightning's own GAN example raises for unused parameters.


class Gan(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.sent: list[set[str]] = []

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        for optimizer, sign in ((generator, 1.0), (critic, -1.0)):
            self.toggle_optimizer(optimizer)
            fake = self.backbone(batch).tanh()
            loss = sign * self.head(fake).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.backbone.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]


class Untoggled(Gan):
    def toggle_optimizer(self, optimizer):
        pass

    untoggle_optimizer = toggle_optimizer


@both_worlds
@pytest.mark.parametrize("kind", [Gan, Untoggled])
def test_b09_gan_with_toggled_and_untoggled_optimizers(world_size, kind):
    same_weights(kind, world_size)


def test_b09_control_ddp_raises():
    def run(rank, world_size, port):
        fit(Gan(), rank, world_size, port, ddp())

    with pytest.raises(RankError, match=r"finished reduction|unused"):
        ranks(run, 2)


# b10. ddp(static_graph=True): crashes with accumulation. Here the flag is accepted and does nothing.


@both_worlds
def test_b10_static_graph_with_accumulation(world_size):
    options = {
        "static_graph": True,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
    }
    same_weights(Base, world_size, options, accumulate_grad_batches=2)


# b12. ddp: raises on a second backward through one forward.


class TwoBackwards(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        features = self.backbone(batch)
        self.manual_backward(self.head(features).square().mean(), retain_graph=True)
        self.manual_backward(features.square().mean())
        optimizer.step()


@both_worlds
def test_b12_two_backwards_of_one_forward(world_size):
    same_weights(TwoBackwards, world_size)
