"""Public reports that need a Trainer, each as a test. A comment says what `ddp` does today.

Weights are compared with those of one process that trains on all ranks' batches, in float64 with SGD.
"""

from __future__ import annotations

import logging
import threading

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.errors import ConfigError, RankFailedError
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import RankError
from tests.support.spies import CollectiveSpy
from tests.support.trainers import Rows, ddp, fit, lean, ranks, same_weights

pytestmark = pytest.mark.multi_process
both_worlds = pytest.mark.parametrize("world_size", [2, 3])


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


# b16. ddp: ignores hooks on a CPU, silently.


def _hooks(rank, world_size, port):
    seen = []

    def spy(state, bucket):
        seen.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    module = Base()
    fit(module, rank, world_size, port, lean(ddp_comm_hook=spy, bucket_cap_mb=0.0004))
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    return len(seen), max(seen)


def test_b16_a_communication_hook_is_called_on_a_cpu():
    for calls, last in ranks(_hooks, 2):
        assert last > 0
        assert calls == 4 * (last + 1), "once a bucket and step"


# b17. ddp: a rank whose training_step returns None raises; returning a leaf loss hangs the others.


class Without(Base):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if self.trainer.world_size > 1 and batch_idx % 2 and self.trainer.global_rank == 1:
            return None
        return self.loss(batch)


def _none(rank, world_size, port):
    records = []
    logger = logging.getLogger("lightning_dp")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    module = Without()
    fit(module, rank, world_size, port, lean(check_replicas_every_n_steps=1))
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    assert module.steps == 4
    # against plain torch: the mean is over the ranks that have a loss
    alone = Base()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    rows = Rows()
    for step in range(4):
        shares = [
            torch.stack([rows[i] for i in rows.share(step, r, world_size)])
            for r in range(world_size)
        ]
        kept = [s for r, s in enumerate(shares) if not (step % 2 and r == 1)]
        sgd.zero_grad()
        (sum(alone.loss(s) for s in kept) / len(kept)).backward()
        sgd.step()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
    return sum("returned None" in record.getMessage() for record in records)


@both_worlds
def test_b17_a_rank_without_a_loss_contributes_nothing(world_size):
    said = ranks(_none, world_size)
    assert said == [int(rank == 1) for rank in range(world_size)], "said once, by the rank itself"


# b18. ddp: the other ranks wait for the group's timeout.


class Failing(Base):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ValueError("boom in training_step")
        return self.loss(batch)


def _failing(rank, world_size, port):
    with pytest.raises((ValueError, RankFailedError), match="boom") as caught:
        fit(Failing(), rank, world_size, port, lean())
    return type(caught.value).__name__


def test_b18_an_exception_of_one_rank_reaches_all():
    found = ranks(_failing, 2, timeout_s=60)
    assert found == ["RankFailedError", "ValueError"]


# c27. ddp(static_graph=True): on_after_backward sees gradients that are not averaged yet.


class Watching(Base):
    def __init__(self):
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def on_after_backward(self):
        self.seen.append(self.head.weight.grad.clone())


def _watching(rank, world_size, port):
    module = Watching()
    fit(module, rank, world_size, port, lean(), accumulate_grad_batches=2)
    return module.seen


@both_worlds
def test_c27_on_after_backward_sees_averaged_gradients(world_size):
    first, *others = ranks(_watching, world_size)
    for other in others:
        equal = [torch.equal(a, b) for a, b in zip(first, other, strict=True)]
        assert equal == [False, True, False, True], "local inside a window, averaged at its end"


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
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        with torch.no_grad():  # a line search needs one loss on all ranks
            mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        return loss - loss.detach() + mean

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


@both_worlds
def test_lbfgs_calls_its_closure_many_times(world_size):
    same_weights(Closures, world_size, tolerance=1e-7)


class Normed(Base):
    def __init__(self):
        super().__init__()
        self.backbone.insert(1, nn.BatchNorm1d(8).double())


@both_worlds
def test_sync_batchnorm_on_a_cpu(world_size):
    def check(module, trainer):
        assert type(module.backbone[1]) is nn.BatchNorm1d, "reverted after fit"

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
