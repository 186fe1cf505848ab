"""Public reports of silent divergence, each as a test. A comment says what `ddp` does today.

Numbers are those of the list in docs/modules.md. What is about the Trainer is in test_modules_trainer.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_dp.engine.replicas import start as replicas
from tests.support.nets import data, net
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    assert_same,
    check,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import RankError, both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# a01. ddp: hooks only what was trainable at the start; what is unfrozen later stays local, silently.


def _freezing(rank, world_size):
    def step(module, backward, index, rank):
        # frozen, unfrozen, frozen again, all frozen but one, unfrozen
        trainable = {0: "3", 1: "23", 2: "0123", 3: "12", 4: "0123", 5: "1", 6: "0123"}[index]
        for name, child in module.named_children():
            child.requires_grad_(name in trainable)
        backward(module(data()).square().mean())

    return check(rank, world_size, net, step, steps=7)


@both_worlds
def test_a01_frozen_unfrozen_and_frozen_again(world_size):
    launches = run_ranks(_freezing, world_size)[0]
    sent = [{name for _, names, _ in step for name in names} for step in launches]
    assert sent[0] == {"3.weight", "3.bias"}, "what is frozen has no bucket and sends nothing"
    assert len(sent[2]) == 8


def _freezing_without_hooks(rank, world_size):
    """Control: an engine that hooks only what is trainable at the start."""

    def step(module, backward, index, rank):
        module[0].requires_grad_(index > 0)
        backward(module(data()).square().mean())

    attach = Harness.__init__

    def only_trainable(self, module, **kwargs):
        module[0].requires_grad_(False)
        module._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]
        attach(self, module, **kwargs)

    Harness.__init__ = only_trainable
    check(rank, world_size, net, step)


def test_a01_control_a_parameter_that_is_not_hooked_is_seen():
    with pytest.raises(RankError, match=r"0\.weight"):
        run_ranks(_freezing_without_hooks, 2)


# a02. ddp: a plain loss.backward() in manual optimization is never averaged, silently.


def _raw(rank, world_size):
    def step(module, backward, index, rank):
        module(data()).square().mean().backward()

    return check(rank, world_size, net, step, raw=True)


@both_worlds
def test_a02_a_plain_backward_is_averaged(world_size):
    run_ranks(_raw, world_size)


# a03. ddp: with an unused parameter the first backward leaves local gradients and raises nothing.


def _unused_at_once(rank, world_size):
    module = seeded(net)
    module.spare = nn.Linear(8, 8).double()
    plain = copy.deepcopy(module)
    torch.manual_seed(rank)
    x = data()
    with Harness(module) as harness:
        harness.backward(module[:4](x).sum())
        found = grads(module)
    plain[:4](x).sum().backward()
    assert_same(found, mean_over_ranks(grads(plain), plain))
    assert found["spare.weight"] is None


@both_worlds
def test_a03_the_first_backward_with_an_unused_parameter(world_size):
    run_ranks(_unused_at_once, world_size)


# a04. ddp: parameters added or replaced after the wrap are never averaged, silently.


def _later_parameters(rank, world_size):
    module = seeded(net)
    with Harness(module) as harness:

        def step(index):
            module.zero_grad()
            plain = copy.deepcopy(module)
            torch.manual_seed(10 * index + rank)
            x = data()
            plain(x).square().sum().backward()
            expected = mean_over_ranks(grads(plain), plain)
            harness.backward(module(x).square().sum())
            assert_same(grads(module), expected)
            assert_equal_on_all_ranks(dict(module.named_parameters()))

        step(0)
        torch.manual_seed(rank)  # the new values differ between ranks
        module.append(nn.Linear(8, 8).double())
        module[1].weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        missing = harness.reducer.registry.missing()
        assert set(missing) == {"1.weight", "4.weight", "4.bias"}
        replicas.broadcast([missing[name] for name in sorted(missing)], harness.group)
        assert set(harness.reducer.add_parameters()) == set(missing)
        assert not harness.reducer.registry.missing()
        for index in range(1, 4):
            step(index)
        sent = {name for _, names, _ in harness.recording.launches[-9:] for name in names}
        assert "4.weight" in sent
        slots = [slot for bucket in harness.reducer.layout.buckets for slot in bucket.slots]
        held = {id(slot.param) for slot in slots if not slot.param.is_meta}
        assert held == {id(p) for p in module.parameters()}, "a replaced parameter is let go"
        assert sum(slot.removed for slot in slots) == 1


@both_worlds
def test_a04_parameters_added_and_replaced(world_size):
    run_ranks(_later_parameters, world_size)


# a05. ddp: a step through anything but the wrapper's forward is never averaged, silently.


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def compute_loss(self, x):
        return self.inner(x).square().mean()


def _other_entry(rank, world_size):
    def step(module, backward, index, rank):
        if index % 2:
            backward(module.compute_loss(data()))
        else:
            backward(module.inner[2](module.inner[0].forward(data())).sum())

    return check(rank, world_size, WithLoss, step)


@both_worlds
def test_a05_any_method_of_the_module(world_size):
    run_ranks(_other_entry, world_size)


# a06. ddp: overwrites a buffer between two forwards of one graph; the gradient is wrong, silently.


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        # written in place in training, and read by the graph, as codebooks are
        self.scale += x.detach().abs().mean()
        return (self.weight * x * self.scale.clone()).sum()


def _buffer_between(rank, world_size):
    def step(module, backward, index, rank):
        x = torch.ones(4, dtype=torch.float64) * (rank + 1)
        first = module(x)
        second = module(x)
        backward(first + second)

    check(rank, world_size, Scaled, step, steps=1, with_keeper=True)


@both_worlds
def test_a06_a_buffer_is_not_overwritten_between_two_forwards(world_size):
    run_ranks(_buffer_between, world_size)
