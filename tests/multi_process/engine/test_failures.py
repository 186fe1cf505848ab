"""Public reports of hard failures, each as a test. A comment says what `ddp` does today.

Numbers are those of the list in docs/modules.md. What is about the Trainer is in test_modules_trainer.py.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lightning_dp.errors import RankFailedError
from tests.support.nets import Boom, data, net
from tests.support.parity import Harness, assert_equal_on_all_ranks, check, grads, seeded
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("each_wire")]


# b09. ddp: raises for unused parameters in Lightning's own GAN example. Here the engine's part of it.


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = net(3), net(3)


def _gan(rank, world_size, toggle):
    def step(module, backward, index, rank):
        trained = module.critic if index % 2 else module.generator
        if toggle:
            for part in (module.generator, module.critic):
                part.requires_grad_(part is trained)
        fake = module.generator(data())
        fake = fake.detach() if trained is module.critic else fake
        backward(module.critic(fake).square().mean())

    launches = check(rank, world_size, Gan, step)
    return [{name.split(".")[0] for _, names, _ in step for name in names} for step in launches]


@both_worlds
@pytest.mark.parametrize("toggle", [True, False])
def test_b09_a_gan_with_and_without_toggling(world_size, toggle):
    sent = run_ranks(_gan, world_size, toggle)[0]
    if toggle:
        assert sent == [{"generator"}, {"critic"}] * 2, "the other half stays at home"


# b12. ddp: raises on the second backward of one forward.


def _two_backwards(rank, world_size):
    def step(module, backward, index, rank):
        first = module[:3](data())
        second = module[3](first)
        if index % 2:
            second.square().mean().backward(retain_graph=True)
            first.sum().backward()
        else:
            backward(second.square().mean(), retain_graph=True)
            backward(first.sum())

    check(rank, world_size, net, step, raw=True)
    check(rank, world_size, net, step)


@both_worlds
def test_b12_one_forward_two_backwards(world_size):
    run_ranks(_two_backwards, world_size)


# b13. ddp(static_graph=True): raises on the second step if an output is not used in the loss.


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = net(2), net(1), net(1)

    def forward(self, x):
        x = self.body(x)
        return self.a(x), self.b(x)


def _unused_output(rank, world_size):
    def step(module, backward, index, rank):
        a, b = module(data())
        backward(a.sum() if index < 3 else (a * b).sum())

    check(rank, world_size, TwoHeads, step, steps=5)


@both_worlds
def test_b13_an_output_that_the_loss_does_not_use(world_size):
    run_ranks(_unused_output, world_size)


# b14. ddp: backward(create_graph=True) fails with an in-place operation on a leaf.


def _create_graph(rank, world_size, dtype):
    def step(module, backward, index, rank):
        backward(module(data().to(dtype)).square().mean(), create_graph=True)
        for p in module.parameters():  # as the manual advises, to break the reference cycle
            p.grad = p.grad.detach()

    def mixed():
        module = net().to(dtype)
        module[1].float()
        module[2].float()
        module.insert(1, Cast(torch.float32))
        module.insert(4, Cast(dtype))
        return module

    check(rank, world_size, mixed, step)


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@both_worlds
def test_b14_backward_with_create_graph(world_size):
    run_ranks(_create_graph, world_size, torch.float64)


def _penalty(rank, world_size):
    def step(module, backward, index, rank):
        x = data().requires_grad_()
        out = module(x).tanh().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        backward(out + (slope.norm(dim=1) - 1).square().mean())

    check(rank, world_size, net, step)


@both_worlds
def test_b14_gradient_penalty(world_size):
    run_ranks(_penalty, world_size)


# b18. ddp: an exception on one rank leaves the others waiting until the group's timeout.


def _one_rank_fails(rank, world_size):
    module = seeded(net)
    bad = world_size - 1
    with Harness(module) as harness:
        for index in range(4):
            module.zero_grad()
            half = module[:2](data())
            half = Boom.apply(half) if index == 2 and rank == bad else half
            loss = module[2:](half).square().mean()
            if index != 2:
                harness.backward(loss)
                assert_equal_on_all_ranks(grads(module))
                continue
            begin = time.monotonic()
            if rank == bad:
                with pytest.raises(ValueError, match="boom"):
                    harness.backward(loss)
            else:
                with pytest.raises(RankFailedError, match=f"rank {bad} failed") as caught:
                    harness.backward(loss)
                assert caught.value.rank == bad
            assert all(p.grad is None for p in module.parameters())
            assert time.monotonic() - begin < 10


@both_worlds
def test_b18_an_exception_in_one_ranks_backward_reaches_all(world_size):
    run_ranks(_one_rank_fails, world_size)


def _spied_control(rank, world_size):
    with Harness(seeded(net)) as harness:
        with CollectiveSpy() as spy:
            harness.backward(harness.module(data()).sum())
        assert spy.total > 0


def test_control_the_spy_sees_the_engine():
    run_ranks(_spied_control, 2)


class Interrupted(BaseException):
    pass


def _interrupted_while_it_sends(rank, world_size, guarded):
    """Interrupt every rank as its first, second, third bucket is to leave; return how many did later."""
    left = []
    for at in range(3):
        with Harness(seeded(lambda: net(3))) as harness:
            module, launch = harness.module, harness.recording.launch
            harness.backward(module(data()).square().mean())
            count = 0

            def launch_or_be_interrupted(bucket, at=at, launch=launch, harness=harness):
                nonlocal count
                count += 1
                if count != at + 1:
                    return launch(bucket)
                if not guarded:
                    harness.reducer._reduction._is_sending = False
                raise Interrupted

            harness.recording.launch = launch_or_be_interrupted
            with pytest.raises(Interrupted):
                harness.backward(module(data()).square().mean())
            left.append(count - at - 1)
    return left


@pytest.mark.parametrize("guarded", [True, False], ids=["", "control"])
def test_a_rank_that_is_interrupted_while_it_sends_sends_nothing_more(guarded):
    for left in run_ranks(_interrupted_while_it_sends, 2, guarded):
        assert (left == [0, 0, 0]) == guarded, left
