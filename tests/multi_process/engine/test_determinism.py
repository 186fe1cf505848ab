"""Strides, hooks of the user, equal bits, equal replicas: entries c25 to c30 of docs/modules.md."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.errors import ReplicaMismatchError
from tests.support.nets import branches, data
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    assert_same,
    check,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# c25. ddp: warns that "grad strides do not match bucket view strides" and copies twice.


def _strides(rank, world_size):
    def make():
        net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1))
        return net.to(memory_format=torch.channels_last)

    def step(module, backward, index, rank):
        x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
        backward(module(x).square().mean())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(rank, world_size, make, step)
        module = seeded(make)
        with Harness(module) as harness:
            step(module, harness.backward, 0, rank)
            for p in module.parameters():
                assert p.grad.stride() == p.stride()


@both_worlds
def test_c25_channels_last_without_a_warning(world_size):
    run_ranks(_strides, world_size)


# c28. ddp: an optimizer in backward is a feature of its own. Here gradients are whole after backward,
# and a user's hooks on parameters still run (they see this rank's own gradient, as with ddp).


def _user_hooks(rank, world_size):
    module = seeded(branches)
    seen = []
    module.first.weight.register_hook(lambda g: seen.append("tensor hook") or g * 2)
    module.first.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad is not None)
    )
    plain = copy.deepcopy(module)
    plain.first.weight.register_hook(lambda g: g * 2)
    with Harness(module) as harness:
        x = data()
        harness.backward(module(x).square().mean())
        plain(x).square().mean().backward()
        assert_same(grads(module), mean_over_ranks(grads(plain), plain))
    assert seen == ["tensor hook", True]


def test_c28_hooks_of_the_user_run_before_the_engines():
    run_ranks(_user_hooks, 2)


# c29. ddp: the layout, and with it the last bits, depend on a rebuild after the first step.


def _twice_the_same(rank, world_size):
    runs = []
    for _ in range(2):
        module = seeded(lambda: branches().float())
        with Harness(module) as harness:
            bits = []
            for index in range(5):
                torch.manual_seed(10 * index + rank)
                module.zero_grad()
                harness.backward(module(torch.randn(64, 8), use=index != 2).square().mean())
                bits.append({k: v for k, v in grads(module).items() if v is not None})
            runs.append((bits, harness.reducer.layout.signature))
    assert runs[0][1] == runs[1][1]
    for first, second in zip(runs[0][0], runs[1][0], strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    return runs[0][1]


@both_worlds
def test_c29_two_runs_give_the_same_bits(world_size):
    layouts = run_ranks(_twice_the_same, world_size)
    assert all(layout == layouts[0] for layout in layouts)


# c30. ddp: accepts another order, other dtypes, another requires_grad on some rank; averages unlike things.


def _start(rank, world_size, how):
    module = branches()
    if rank == world_size - 1:
        if how == "order":
            first = module._modules.pop("first")
            module._modules["first"] = first
        elif how == "dtype":
            module.maybe.float()
        elif how == "requires_grad":
            module.maybe.requires_grad_(False)
        elif how == "tie":
            module.maybe.weight = module.first.weight
        elif how == "buffer":
            module.register_buffer("extra", torch.ones(2))
    group = ReplicaGroup.create(torch.get_default_device())
    if how == "equal":
        with torch.no_grad():
            for p in module.parameters():
                p.add_(rank)
        replicas.synchronize(module, group)
        assert_equal_on_all_ranks(module.state_dict())
        return None
    with pytest.raises(ReplicaMismatchError) as caught:
        replicas.synchronize(module, group)
    return caught.value.names, caught.value.ranks


@both_worlds
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("equal", None),
        ("order", "first.weight"),
        ("dtype", "maybe.weight"),
        ("requires_grad", "maybe.weight"),
        ("tie", "maybe.weight"),
        ("buffer", "extra"),
    ],
)
def test_c30_replicas_are_compared_at_the_start(world_size, how, name):
    for found in run_ranks(_start, world_size, how):
        assert found == (None if name is None else ((name,), (world_size - 1,)))


# Not a report of its own: a gradient that the user kept has the same values after the next backward, as
# on one device. ddp(gradient_as_bucket_view=True): it is overwritten.


def _kept_gradients(rank, world_size, raw):
    module = seeded(branches)
    with Harness(module) as harness:
        kept = []
        for index in range(5):
            torch.manual_seed(10 * index + rank)
            module.zero_grad()
            loss = module(data()).square().mean()
            if raw:
                loss.backward()
                harness.reducer.finalize()
            else:
                harness.backward(loss)
            if index % 2:
                held = (
                    module.last.weight.grad if index == 1 else module.last.weight.grad.detach()[:2]
                )
                kept.append((held, held.clone()))
                del held
            for held, values in kept:
                assert torch.equal(held, values)
        held = module.first.weight.grad  # not zeroed: one tensor, in place, as on one device
        harness.backward(module(data()).square().mean())
        assert held is module.first.weight.grad
        flats = [bucket.flat for bucket in harness.reducer.layout.buckets]
        del held, kept
        for _ in range(2):
            module.zero_grad()
            harness.backward(module(data()).square().mean())
        again = [bucket.flat for bucket in harness.reducer.layout.buckets]
        assert all(a is b for a, b in zip(flats, again, strict=True)), (
            "nothing is kept: memory is reused"
        )


@both_worlds
@pytest.mark.parametrize("raw", [False, True])
def test_a_gradient_that_was_kept_keeps_its_values(world_size, raw):
    run_ranks(_kept_gradients, world_size, raw)
