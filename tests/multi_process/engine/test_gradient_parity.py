"""The engine's gradients equal the mean of the ranks' local gradients, at 2 and 3 ranks, with controls."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.wires.wire import Done, Wire
from tests.support.nets import Boom, branches
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    check,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import RankError, both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("each_wire")]


def mlp() -> nn.Module:
    return nn.Sequential(
        *[m for _ in range(4) for m in (nn.Linear(12, 12), nn.Tanh())], nn.Linear(12, 3)
    ).double()


def plain_step(module, backward, index, rank):
    x = torch.randn(5, 12, dtype=torch.float64)
    backward(module(x).square().mean())


def _plain(rank, world_size):
    return check(rank, world_size, mlp, plain_step)


@both_worlds
def test_gradients_are_the_mean_of_local_gradients(world_size):
    launches = run_ranks(_plain, world_size)
    buckets = [sorted(index for index, _, _ in step) for step in launches[0]]
    assert len(buckets[0]) > 2, "the test should have several buckets"
    assert all(step == buckets[0] for step in buckets), "one collective a bucket and step"


@dataclass
class NoWire(Wire):
    """Control: nothing is communicated."""

    group: object

    def launch(self, bucket: Bucket):
        bucket.allocate()
        return Done()


@dataclass
class SumWire(NoWire):
    """Control: the sum in place of the mean."""

    def launch(self, bucket: Bucket):
        bucket.allocate()
        return dist.all_reduce(bucket.flat, group=self.group.process_group, async_op=True)


def _with_wire(rank, world_size, wire):
    check(rank, world_size, mlp, plain_step, wire=wire)


@both_worlds
@pytest.mark.parametrize("wire", [NoWire, SumWire])
def test_control_a_wrong_wire_is_seen(world_size, wire):
    with pytest.raises(RankError, match="Tensor-likes are not close"):
        run_ranks(_with_wire, world_size, wire)


def _twenty_steps(rank, world_size):
    module = seeded(mlp).float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    with Harness(module) as harness:
        for index in range(20):
            torch.manual_seed(100 * index + rank)
            optimizer.zero_grad()
            harness.backward(module(torch.randn(5, 12)).square().mean())
            optimizer.step()
    assert_equal_on_all_ranks(dict(module.named_parameters()))


@both_worlds
def test_weights_are_bit_identical_after_20_steps(world_size):
    run_ranks(_twenty_steps, world_size)


def _accumulate(rank, world_size):
    module = seeded(mlp)
    plain = copy.deepcopy(module)
    with Harness(module) as harness:
        for window in range(3):
            module.zero_grad(), plain.zero_grad()
            for micro in range(3):
                x = torch.randn(
                    5,
                    12,
                    dtype=torch.float64,
                    generator=torch.Generator(torch.get_default_device()).manual_seed(
                        100 * window + 10 * micro + rank
                    ),
                )
                plain(x).square().mean().backward()
                loss = module(x).square().mean()
                if micro < 2:
                    with harness.window.closed():
                        harness.backward(loss)
                    mine = grads(module)
                    for name, grad in grads(plain).items():
                        assert torch.equal(mine[name], grad), (
                            "inside the window gradients stay local"
                        )
                    assert not harness.recording.launches
                else:
                    harness.backward(loss)
            expected = mean_over_ranks(grads(plain), plain)
            for name, grad in grads(module).items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
            harness.recording.launches.clear()


@both_worlds
def test_accumulation_reduces_once_a_window(world_size):
    run_ranks(_accumulate, world_size)


def branch_step(module, backward, index, rank):
    x = torch.randn(4, 8, dtype=torch.float64)
    # step 3: nobody uses it, so its gradient is None everywhere
    backward(module(x, use=index < 3 and rank == index % dist.get_world_size()).square().mean())


def _branches(rank, world_size):
    return check(rank, world_size, branches, branch_step, steps=6)


@both_worlds
def test_unused_parameters_on_one_rank_on_all_and_by_turns(world_size):
    run_ranks(_branches, world_size)


def _exception(rank, world_size):
    module = seeded(mlp)

    def run(fail: bool):
        module.zero_grad()
        torch.manual_seed(rank)
        x = torch.randn(5, 12, dtype=torch.float64)
        half = module[:4](x)
        half = Boom.apply(half) if fail else half
        harness.backward(module[4:](half).square().mean())
        return grads(module)

    with Harness(module) as harness:
        before = run(fail=False)
        with pytest.raises(ValueError, match="boom in backward"):
            run(fail=True)  # on every rank: all catch it and go on
        after = run(fail=False)
        for name, grad in before.items():
            assert torch.equal(grad, after[name]), "the engine works as before the exception"


@both_worlds
def test_an_exception_in_backward_leaves_a_usable_engine(world_size):
    run_ranks(_exception, world_size)


def _close(rank, world_size):
    module = seeded(mlp)
    with Harness(module) as harness:
        harness.backward(module(torch.ones(1, 12, dtype=torch.float64)).sum())
        grad = module[0].weight.grad
    assert all(not p._post_accumulate_grad_hooks for p in module.parameters())
    assert torch.isfinite(grad).all()
    module.zero_grad()
    module(torch.ones(1, 12, dtype=torch.float64) * (rank + 1)).sum().backward()  # local again


def test_close_leaves_no_hook_behind():
    run_ranks(_close, 2)
