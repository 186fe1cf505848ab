"""A rank that differs from the others, and hooks that see averages: entries b16 to c27, with a Trainer."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.errors import RankFailedError
from tests.support.logs import log_lines
from tests.support.modules import Base
from tests.support.nets import Boom
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import both_worlds
from tests.support.trainers import Rows, fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


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
    records = log_lines()
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
    return sum("returned None" in line for line in records)


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


class FailingBackward(Base):
    step = 0

    def loss(self, x):
        features = self.backbone(x)
        if self.trainer.global_rank == 1 and self.trainer.global_step == self.step:
            features = Boom.apply(features)
        return self.head(features).square().mean()


def _failing_backward(rank, world_size, port, step, hook):
    module = FailingBackward()
    module.step = step
    with pytest.raises((ValueError, RankFailedError), match="boom") as caught:
        fit(module, rank, world_size, port, lean(ddp_comm_hook=hook))
    return type(caught.value).__name__


@pytest.mark.parametrize(
    ("step", "hook"), [(0, None), (2, None), (2, default_hooks.allreduce_hook)]
)
def test_b18_a_backward_that_dies_before_or_after_the_order_is_known(step, hook):
    assert ranks(_failing_backward, 2, step, hook) == ["RankFailedError", "ValueError"]


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
