"""Backwards inside of backwards: entry b11 of docs/modules.md."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.errors import LateGradientError
from tests.support.nets import data, net
from tests.support.parity import Harness, assert_equal_on_all_ranks, check, grads, seeded
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# b11. ddp: "marked ready twice" for re-entrant checkpoints that share layers and for inner backwards.


class Checkpointed(nn.Module):
    def __init__(self, mode: str):
        super().__init__()
        self.mode = mode
        self.first, self.shared, self.last = net(2), net(2), net(2)

    def forward(self, x):
        again = functools.partial(checkpoint, use_reentrant=not self.mode.startswith("non"))
        if self.mode.endswith("whole"):
            return again(lambda y: self.last(self.shared(self.first(y).tanh()).tanh()), x)
        x = again(self.first, x).tanh()
        x = again(self.shared, x).tanh()
        if self.mode.endswith("twice"):
            x = again(self.shared, x).tanh()
        return self.last(x)


def _checkpointed(rank, world_size, mode):
    for raw in (False, True):

        def step(module, backward, index, rank, raw=raw):
            loss = module(data().requires_grad_()).square().mean()
            loss.backward() if raw else backward(loss)

        check(rank, world_size, lambda: Checkpointed(mode), step, raw=raw)


@both_worlds
@pytest.mark.parametrize("mode", ["once", "twice", "whole", "non-once", "non-twice", "non-whole"])
def test_b11_activation_checkpointing(world_size, mode):
    run_ranks(_checkpointed, world_size, mode)


class Tiled(torch.autograd.Function):
    """Recomputes in chunks, each with a backward of its own, as tiled MLPs do."""

    @staticmethod
    def forward(ctx, module, chunks, x, *parameters):
        ctx.module, ctx.chunks = module, chunks
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([module(part) for part in x.chunk(chunks)])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        pieces = []
        for part, g in zip(x.chunk(ctx.chunks), grad.chunk(ctx.chunks), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.module(part)
            torch.autograd.backward(out, g)
            pieces.append(part.grad)
        return (None, None, torch.cat(pieces), *[None] * len(list(ctx.module.parameters())))


def _tiled(rank, world_size):
    def step(module, backward, index, rank):
        x = module[0](data(6)).tanh()
        x = Tiled.apply(module[1], 3, x, *module[1].parameters())
        backward(module[2](x).square().mean())

    check(rank, world_size, lambda: nn.Sequential(net(2), net(2), net(2)), step)


@both_worlds
def test_b11_inner_backwards_of_a_tiled_mlp(world_size):
    run_ranks(_tiled, world_size)


def _late(rank, world_size):
    """Shared re-entrant blocks appear after the order was learnt, on one rank only."""
    module = seeded(lambda: Checkpointed("once"))
    found = []
    alone = LayoutOptions(
        cap_bytes=64, first_bytes=64, last_bytes=64
    )  # each parameter leaves at once
    with Harness(module, options=alone) as harness:
        for index in range(4):
            module.zero_grad()
            module.mode = "twice" if index >= 2 and rank == world_size - 1 else "once"
            torch.manual_seed(10 * index + rank)
            loss = module(data().requires_grad_()).square().mean()
            if index == 2:
                with pytest.raises(LateGradientError) as caught:
                    harness.backward(loss)
                found.append((sorted(caught.value.names), caught.value.ranks))
                assert all(p.grad is None for p in module.parameters()), "nothing half-averaged"
            else:
                harness.backward(loss)
        assert_equal_on_all_ranks(grads(module))  # sent last now: it works from the next step on
    return found


@both_worlds
def test_b11_late_gradients_raise_by_name_on_all_ranks(world_size):
    for found in run_ranks(_late, world_size):
        for names, ranks in found:
            assert set(names) <= {
                f"shared.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")
            }
            assert names
            assert ranks == (world_size - 1,)
