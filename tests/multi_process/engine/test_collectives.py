"""How many collectives: none in forward, one a bucket in a synchronised backward, none in the others."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dp.data_plane.gather import all_gather
from lightning_dp.engine import group as group_module
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.replicas.buffers import BufferKeeper
from tests.support.parity import Harness, seeded
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 4), nn.Linear(4, 4),
    )  # fmt: skip


def _count(rank, world_size):
    module = seeded(conv_net)
    spy = CollectiveSpy()
    module.unused = nn.Linear(4, 4)  # in no graph: costs no collective either
    with Harness(module, with_keeper=True) as harness:

        def loss():
            return module[:9](torch.randn(4, 3, 6, 6)).square().mean()

        harness.backward(loss())  # learns the order
        buckets = len(harness.reducer.layout.buckets)
        assert buckets > 3
        for _ in range(4):
            module.zero_grad()
            for _ in range(2):
                with spy.expecting():
                    harness.before_step()
                    value = loss()
                with harness.window.closed(), spy.expecting():
                    harness.backward(value)
            with spy.expecting():
                value = loss()
            harness.recording.launches.clear()
            with spy.expecting(allreduce=buckets):
                harness.backward(value)
            sent = [index for index, _, _ in harness.recording.launches]
            assert sorted(sent) == list(range(buckets)), "each bucket once"
    assert spy.calls == {"all_reduce": 4 * buckets}, spy.calls
    return sent


@both_worlds
def test_no_collective_in_forward_one_a_bucket_in_backward(world_size):
    orders = run_ranks(_count, world_size)
    assert all(order == orders[0] for order in orders), "the same order on every rank"


def _half(rank, world_size):
    module = seeded(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16())
    with Harness(module) as harness:
        for step in range(3):
            loss = module(torch.randn(4, 16).bfloat16()).square().mean()
            spy = CollectiveSpy()
            if step == 0:
                harness.backward(loss)
                continue
            # bfloat16 cannot hold the control tail: one small message more, for the whole model
            with spy.expecting(allreduce=len(harness.reducer.layout.buckets) + 1):
                harness.backward(loss)


def test_a_half_precision_model_sends_its_control_tail_separately():
    run_ranks(_half, 2)


def _control(rank, world_size):
    spy = CollectiveSpy()
    tensor = torch.ones(3)
    with spy:
        dist.all_reduce(tensor)
        dist.group.WORLD.allreduce([tensor]).wait()  # past every Python function
        dist.all_gather_object([None] * world_size, 1)
    assert spy.calls == {"all_reduce": 1, "all_gather_object": 1}
    assert spy.ops["allreduce"] == 2
    with pytest.raises(AssertionError, match="collectives"), spy.expecting():
        dist.all_reduce(tensor)
    module = seeded(conv_net)
    wrapped = nn.parallel.DistributedDataParallel(module)
    wrapped(torch.randn(4, 3, 6, 6))
    spy = CollectiveSpy()
    with spy:  # and from C++: DDP sends buffers in each forward and buckets in each backward
        loss = wrapped(torch.randn(4, 3, 6, 6)).square().mean()
        in_forward = spy.total
        loss.backward()
    assert in_forward > 0
    assert spy.total > in_forward


def test_control_the_spy_sees_all_levels():
    run_ranks(_control, 2)


def _keeper_without_buffers(rank, world_size):
    keeper = BufferKeeper(nn.Linear(3, 3), Harness(nn.Linear(3, 3)).group)
    with CollectiveSpy().expecting():
        keeper.before_step()
        keeper.changed()
        keeper.before_step()
    with CollectiveSpy().expecting(allgather=2):  # another rank may have got a buffer meanwhile
        keeper.before_use()


def test_a_module_without_buffers_asks_once_before_use_and_sends_nothing():
    run_ranks(_keeper_without_buffers, 2)


def _gathers(rank, world_size, sync_grads):
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available

    results = []
    for gather in (all_gather, _all_gather_ddp_if_available):
        leaf = torch.arange(6.0).reshape(3, 2).t().requires_grad_() * (rank + 1)  # not contiguous
        leaf.retain_grad()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gathered = gather(leaf, dist.group.WORLD, sync_grads=sync_grads)
            assert gathered.requires_grad is sync_grads
            if sync_grads:
                weights = torch.arange(world_size * 6.0).reshape(world_size, 2, 3) * (rank + 2)
                (gathered * weights).sum().backward()
        results.append((gathered.detach(), leaf.grad, len(said)))
    return results


@both_worlds
@pytest.mark.parametrize("sync_grads", [False, True])
def test_all_gather_is_lightnings_without_its_deprecated_function(sync_grads, world_size):
    for ours, lightnings in run_ranks(_gathers, world_size, sync_grads):
        torch.testing.assert_close(ours[:2], lightnings[:2], rtol=0, atol=0)
        assert ours[2] == 0


def _threads_and_a_fallback(rank, world_size, interfaces):
    if interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    group = ReplicaGroup.create(torch.device("cpu"), timedelta(seconds=77))
    cpu = torch.device("cpu")
    options = group.process_group._get_backend(cpu).options
    value = torch.full((3,), float(rank))
    group.all_reduce_mean(value)
    objects = group.all_gather_object(rank)
    seen = (options._threads, len(options._devices), options._timeout.total_seconds())
    group.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "wide_gloo", lambda: None)
        plain = ReplicaGroup.create(cpu)
        other = torch.full((3,), float(rank))
        plain.all_reduce_mean(other)
        plain.close()
    return seen, value.tolist(), objects, other.tolist()


@pytest.mark.cpu_only("about gloo's threads")
@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo"])
def test_gradients_have_a_gloo_group_with_enough_threads(interfaces):
    devices = max(1, len(interfaces.split(",")))
    for result in run_ranks(_threads_and_a_fallback, 3, interfaces):
        assert result == ((8, devices, 77.0), [1.0] * 3, [0, 1, 2], [1.0] * 3)
