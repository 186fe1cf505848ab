"""What weighs how much, and who skips a step: entries a07 and a08 of docs/modules.md."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from tests.support import grounds
from tests.support.nets import data, net
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    assert_same,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# a07. ddp: averages ranks, not tokens: a rank with few tokens weighs as much as one with many.


def _token_weights(rank, world_size):
    module = seeded(net)
    plain = copy.deepcopy(module)
    tokens = [[3, 1, 6][rank], [2, 7, 1][rank]]
    with Harness(module) as harness:
        sums = torch.zeros((), dtype=torch.float64)
        for micro, n in enumerate(tokens):
            torch.manual_seed(10 * micro + rank)
            x = data(n)
            sums = sums + plain(x).square().mean(dim=1).sum()
            loss = module(x).square().mean(dim=1).mean()
            harness.window.add(weight=n, loss=loss)
            if micro == 0:
                with harness.window.closed():
                    harness.backward(loss * n)
            else:
                harness.backward(loss * n)
    sums.backward()
    everyone = torch.tensor(float(sum(tokens)))
    dist.all_reduce(everyone)
    expected = {
        name: grad * world_size / everyone.item()
        for name, grad in mean_over_ranks(grads(plain), plain).items()
    }
    assert_same(grads(module), expected)


@both_worlds
def test_a07_the_mean_is_over_tokens_of_all_ranks(world_size):
    run_ranks(_token_weights, world_size)


# a08. ddp: fine in the plain case; engines that combine found_inf with MAX lose NaN on gloo.


def _scaler(rank, world_size, bad):
    module = seeded(net).float()
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(grounds.CURRENT.device_type, init_scale=1024.0, growth_interval=2)
    scales, weights = [], []
    with Harness(module) as harness:
        for index in range(4):
            torch.manual_seed(10 * index + rank)
            loss = module(torch.randn(4, 8)).square().mean()
            if index == 1 and rank == world_size - 1:
                loss = loss * bad
            optimizer.zero_grad()
            harness.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            weights.append(module[0].weight.detach().clone())
            assert_equal_on_all_ranks(dict(module.named_parameters()))
    assert torch.equal(weights[0], weights[1]), "the step with a bad gradient is skipped"
    assert not torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], plain[0].weight)
    return scales


@both_worlds
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_a08_all_ranks_skip_the_step_that_one_rank_spoilt(world_size, bad):
    scales = run_ranks(_scaler, world_size, bad)
    assert all(each == scales[0] for each in scales)
    assert scales[0] == [1024.0, 512.0, 512.0, 1024.0]


def _max_drops_nan(rank, world_size):
    found = torch.tensor(float("nan") if rank == 1 else 1.0)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    mean = torch.tensor(float("nan") if rank == 1 else 1.0)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return found.item(), mean.item()


@pytest.mark.cpu_only("a fact about gloo")
def test_a08_control_a_maximum_would_lose_the_nan():
    for found, mean in run_ranks(_max_drops_nan, 2):
        assert found == 1.0
        assert mean != mean
