"""BatchNorm over all ranks on a CPU. ddp: torch's SyncBatchNorm raises there."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_dp.engine.replicas.sync_batch_norm import (
    Synced,
    revert_batch_norms,
    synchronize_batch_norms,
)
from tests.support.parity import Harness, assert_same, grads, seeded
from tests.support.ranks import RankError, both_worlds, run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = pytest.mark.multi_process


class Own(nn.BatchNorm1d):
    """A user's subclass."""


KINDS = {
    "1d": (lambda: nn.BatchNorm1d(5), (5,)),
    "1d, sequence": (lambda: nn.BatchNorm1d(5), (5, 7)),
    "2d": (lambda: nn.BatchNorm2d(5), (5, 3, 4)),
    "3d": (lambda: nn.BatchNorm3d(5), (5, 2, 3, 2)),
    "not affine": (lambda: nn.BatchNorm2d(5, affine=False), (5, 3, 4)),
    "no running statistics": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (5, 3, 4)),
    "cumulative": (lambda: nn.BatchNorm2d(5, momentum=None), (5, 3, 4)),
    "a subclass": (lambda: Own(5), (5,)),
}
SIZES = ([3, 1, 4], [2, 0, 6], [1, 1, 1])  # samples of each rank: unequal, none at all, one


def _whole_batch(rank, world_size, kind, sizes):
    """One step on this rank's share against one step of plain BatchNorm on everything."""
    make, shape = KINDS[kind]
    module = seeded(lambda: nn.Sequential(make(), nn.Tanh(), make())).double()
    whole = copy.deepcopy(module)
    for m in (module, whole):
        m.train()
    synchronize_batch_norms(module)
    sizes = sizes[:world_size]
    begin = sum(sizes[:rank])
    with Harness(module) as harness:
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(sum(sizes), *shape, dtype=torch.float64) * 3 + 1e4  # a large mean
            target = torch.randn_like(x)
            mine = x[begin : begin + sizes[rank]].clone().requires_grad_()
            x = x.requires_grad_()
            module.zero_grad(), whole.zero_grad()
            # sums over samples: the mean over ranks of them is 1 / world_size of the whole
            harness.backward((module(mine) * target[begin : begin + sizes[rank]]).sum())
            (whole(x) * target).sum().backward()
            expected = {
                name: None if g is None else g / world_size for name, g in grads(whole).items()
            }
            for name, g in expected.items():
                torch.testing.assert_close(grads(module)[name], g, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(
                mine.grad, x.grad[begin : begin + sizes[rank]], rtol=1e-8, atol=1e-9
            )
            for (name, ours), theirs in zip(module.named_buffers(), whole.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)
    module.eval(), whole.eval()
    x = torch.randn(4, *shape, dtype=torch.float64)
    with CollectiveSpy().expecting():
        torch.testing.assert_close(module(x), whole(x), rtol=1e-10, atol=1e-10)


@both_worlds
@pytest.mark.parametrize("kind", KINDS)
def test_equals_batch_norm_on_the_whole_batch(world_size, kind):
    run_ranks(_whole_batch, world_size, kind, SIZES[0])


@both_worlds
@pytest.mark.parametrize("sizes", SIZES[1:], ids=["one rank has none", "one sample each"])
def test_any_numbers_of_samples(world_size, sizes):
    run_ranks(_whole_batch, world_size, "1d", sizes)


def _local(rank, world_size):
    synchronize_batch_norms.__globals__["_synced"] = lambda cls: cls  # control: nothing is replaced
    _whole_batch(rank, world_size, "2d", SIZES[0])


def test_control_statistics_of_one_rank_are_seen():
    with pytest.raises(RankError, match="not close"):
        run_ranks(_local, 2)


def _one_value(rank, world_size):
    layer = nn.BatchNorm1d(3)
    synchronize_batch_norms(layer)
    with pytest.raises(ValueError, match="more than one value"):
        layer(torch.randn(1 if rank == 0 else 0, 3))


def test_one_value_on_all_ranks_together_is_refused_on_all():
    run_ranks(_one_value, 2)


def _low_precision(rank, world_size):
    torch.manual_seed(0)
    x = torch.randn(4 * world_size, 5) * 0.1 + 50
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)):
        layer = nn.BatchNorm1d(5)
        plain = copy.deepcopy(layer)
        synchronize_batch_norms(layer)
        given = x.to(dtype)
        mine = given[4 * rank : 4 * rank + 4]
        found, expected = layer(mine), plain(given.float())[4 * rank : 4 * rank + 4]
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_low_precision_input_keeps_its_dtype():
    run_ranks(_low_precision, 2)


def _collectives(rank, world_size):
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    synchronize_batch_norms(net)
    x = torch.randn(3, 4, requires_grad=True)
    with CollectiveSpy().expecting(allgather=2):
        loss = net(x).square().sum()
    with CollectiveSpy().expecting(allreduce=2):
        loss.backward()


def test_two_collectives_a_layer():
    run_ranks(_collectives, 2)


def test_only_the_class_changes_and_back():
    net = nn.Sequential(
        nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm2d(4), Own(4)), nn.InstanceNorm1d(4)
    )
    layers = [net[0], net[1][0], net[1][1]]
    before = [(type(m), m.weight, m.running_mean) for m in layers]
    keys = list(net.state_dict())
    assert synchronize_batch_norms(net) == 3
    assert synchronize_batch_norms(net) == 0
    assert [net[0], net[1][0], net[1][1]] == layers
    for layer, (kind, weight, mean) in zip(layers, before, strict=True):
        assert isinstance(layer, Synced)
        assert isinstance(layer, kind)
        assert layer.weight is weight
        assert layer.running_mean is mean
    assert list(net.state_dict()) == keys
    assert isinstance(copy.deepcopy(net)[1][1], Synced)
    assert isinstance(pickle.loads(pickle.dumps(net[0])), Synced)
    net[0](torch.randn(3, 4))  # without a process group: a plain BatchNorm
    revert_batch_norms(net)
    assert [type(m) for m in layers] == [kind for kind, _, _ in before]
    assert_same({}, {})
