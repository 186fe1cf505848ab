"""Sparse gradients of embeddings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.parity import (
    Harness,
    check,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(30, 8, sparse=True)
        self.bag = nn.EmbeddingBag(10, 8, sparse=True, mode="sum")
        self.late = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens, use_bag, dense=False):
        x = self.rows(tokens).sum(dim=1)
        if use_bag:
            x = x + self.bag(tokens % 10)
        if dense:
            x = x + self.rows.weight.sum(dim=0)
        return self.head(self.late(x)).square().mean()


def _sparse(rank, world_size):
    layouts = []

    def step(module, backward, index, rank):
        module.late.requires_grad_(index > 2)  # a layout that grows after sparse slots were planned
        tokens = torch.randint(
            30, (4, 3 + rank)
        )  # other rows, and other numbers of them, on each rank
        backward(
            module(tokens, use_bag=index in (1, 4) and rank == 0, dense=index == 5 and rank == 1)
        )
        if index in (1, 2, 3, 4):
            layouts.append(module.rows.weight.grad.is_sparse)

    launches = check(rank, world_size, lambda: Sparse().double(), step, steps=6)
    assert all(layouts)
    sent = {name for each in launches for _, names, _ in each for name in names}
    assert sent == {"head.weight", "head.bias", "late.weight", "late.bias"}


@both_worlds
def test_sparse_gradients_stay_sparse(world_size):
    run_ranks(_sparse, world_size)


def _sparse_adam(rank, world_size):
    module = seeded(lambda: Sparse().double())
    alone = copy.deepcopy(module)
    for m in (module, alone):
        m.late.requires_grad_(False)
    with Harness(module) as harness:
        pairs = [
            (m, torch.optim.SparseAdam([m.rows.weight, m.bag.weight], lr=0.1))
            for m in (module, alone)
        ]
        for index in range(4):
            batches = [
                torch.randint(
                    30,
                    (4, 3),
                    generator=torch.Generator(torch.get_default_device()).manual_seed(
                        10 * index + r
                    ),
                )
                for r in range(world_size)
            ]
            for m, optimizer in pairs:
                m.zero_grad()
                if m is module:
                    harness.backward(m(batches[rank], use_bag=index > 1))
                else:  # one process, the whole batch: each row's state advances only if the row was used
                    sum(m(b, use_bag=index > 1) / world_size for b in batches).backward()
                optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-10, atol=1e-10)


@both_worlds
def test_sparse_adam_sees_the_rows_of_all_ranks(world_size):
    run_ranks(_sparse_adam, world_size)


def _sparse_toggled(rank, world_size):
    module = seeded(lambda: Sparse().double())
    with Harness(module) as harness:
        harness.backward(module(torch.randint(30, (4, 3)), True))
        module.rows.requires_grad_(False)
        module.bag.requires_grad_(False)
        with CollectiveSpy() as spy:
            harness.backward(module(torch.randint(30, (4, 3)), True))
        assert "allgather" not in spy.ops, spy.ops


def test_frozen_sparse_weights_send_nothing():
    run_ranks(_sparse_toggled, 2)
