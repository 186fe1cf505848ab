"""Buffers: statistics equal before they are read, state of the graph equal at every step."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.errors import RankFailedError, ReplicaMismatchError
from tests.support.nets import data
from tests.support.parity import (
    Harness,
    as_bytes,
    assert_equal_on_all_ranks,
    assert_same,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import RankError, both_worlds, run_ranks
from tests.support.spies import CollectiveSpy, KernelSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


def bn_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)
    ).double()


def everyone(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _statistics(rank, world_size, reduce):
    module = seeded(bn_net)
    keeper = BufferKeeper(module, ReplicaGroup.create(torch.get_default_device()), "lazy", reduce)
    with Harness(module, keeper=keeper) as harness:
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            module.zero_grad()
            harness.before_step()
            harness.backward(module(data(6)).square().mean())
        local = everyone({k: v.clone() for k, v in module.named_buffers()})
        assert len({as_bytes(each["1.running_mean"]) for each in local}) == world_size
        keeper.before_use()
        assert_equal_on_all_ranks(dict(module.named_buffers()))
        for name, value in module.named_buffers():
            parts = [each[name] for each in local]
            mean = reduce == "mean" and value.is_floating_point()
            expected = torch.stack(parts).mean(dim=0) if mean else parts[0]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        with CollectiveSpy().expecting():
            keeper.before_use()  # nothing was trained since


@both_worlds
@pytest.mark.parametrize("reduce", ["broadcast", "mean"])
def test_statistics_are_equal_before_they_are_read(world_size, reduce):
    run_ranks(_statistics, world_size, reduce)


class Codebook(nn.Module):
    """A vector quantiser whose codes follow the data; ``how`` is how the code is written."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.body = nn.Linear(8, 8).double()
        self.register_buffer("codes", torch.randn(5, 8, dtype=torch.float64))
        self.register_buffer("table", torch.randn(8, dtype=torch.float64))  # never changes

    def forward(self, x):
        y = self.body(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(dim=1)
        chosen = self.codes[nearest]
        loss = (y - chosen).square().mean() + (y * self.table).mean()
        new = self.codes.clone()
        new[nearest] = 0.5 * new[nearest] + 0.5 * y.detach()
        if self.how == "in place":
            self.codes.copy_(new)
        elif self.how == "data":
            self.codes.data.copy_(new)
        elif self.how == "assigned":
            self.codes = new
        elif self.how == "data assigned":
            self.codes.data = new
        return loss


def _codebook(rank, world_size, how, mode):
    module = seeded(lambda: Codebook(how))
    with Harness(module, with_keeper=mode) as harness:
        for step in range(5):
            module.zero_grad()
            torch.manual_seed(10 * step + rank)
            harness.before_step()
            # the first forward sees equal codes on all ranks, so the average is of one loss
            assert_equal_on_all_ranks({"codes": module.codes})
            plain = copy.deepcopy(module)
            x = data(6)
            harness.backward(module(x))
            plain(x).backward()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))
            with torch.no_grad():
                for p in module.parameters():
                    p.sub_(0.1 * p.grad)
        harness.before_step()
        sent = harness.keeper._each_step
        assert sent == (["codes"] if mode == "lazy" else ["codes", "table"])
        assert_equal_on_all_ranks(module.state_dict())


@both_worlds
@pytest.mark.parametrize("how", ["in place", "data", "assigned", "data assigned"])
def test_codebooks_are_equal_at_every_step_however_they_are_written(world_size, how):
    run_ranks(_codebook, world_size, how, "lazy")


def test_every_buffer_at_every_step_on_request():
    run_ranks(_codebook, 2, "in place", "step")


def test_control_codebooks_that_nobody_keeps_equal_are_seen():
    with pytest.raises(RankError, match="codes differs"):
        run_ranks(_codebook, 2, "in place", "none")


def _step_mode_statistics(rank, world_size):
    module = seeded(bn_net)
    with Harness(module, with_keeper="step") as harness:
        harness.before_step()
        harness.backward(module(data(6) + rank).square().mean())
        harness.keeper.before_use()
        assert_equal_on_all_ranks(dict(module.named_buffers()))


@both_worlds
def test_statistics_in_step_mode_are_equal_before_they_are_read_too(world_size):
    run_ranks(_step_mode_statistics, world_size)


def _spectral(rank, world_size):
    module = seeded(lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)).double())
    with Harness(module, with_keeper=True) as harness:
        for step in range(4):
            module.zero_grad()
            torch.manual_seed(10 * step + rank)
            harness.before_step()
            plain = copy.deepcopy(module)
            x = data(6)
            harness.backward(module(x).square().mean())
            plain(x).square().mean().backward()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))
            assert_equal_on_all_ranks(module.state_dict())
            with torch.no_grad():
                for p in module.parameters():
                    p.sub_(0.1 * p.grad)


@both_worlds
def test_spectral_norm(world_size):
    run_ranks(_spectral, world_size)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return (self.weight * self.scale).sum() * x.sum()  # autograd saves ``scale``


def _old_value_needed(rank, world_size):
    module = seeded(Scaled)
    with Harness(module, with_keeper=True) as harness:
        harness.before_step()
        harness.backward(module(data(6)))
        with torch.no_grad():
            module.scale += rank + 1
        harness.backward(module(data(6)))  # seen as changed: sent before each step from now on
        assert harness.keeper._each_step == ["scale"]
        module.zero_grad()
        harness.before_step()
        loss = module(data(6))
        harness.before_step()  # overwritten while ``loss`` still needs it
        if rank == 0:  # its own values are the ones that were sent: untouched
            with pytest.raises(RankFailedError, match="failed in the backward"):
                harness.backward(loss)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                harness.backward(loss)
        module.zero_grad()
        harness.before_step()
        harness.backward(module(data(6)))
        assert_equal_on_all_ranks(grads(module))


@both_worlds
def test_a_graph_that_needs_an_old_buffer_raises_instead_of_lying(world_size):
    run_ranks(_old_value_needed, world_size)


def _evaluation_changes(rank, world_size):
    module = seeded(Scaled)
    with Harness(module, with_keeper=True) as harness:
        harness.before_step()
        harness.backward(module(data(6)))
        harness.keeper.before_use()
        with torch.no_grad():  # averaged weights are swapped in for an evaluation, and out again
            module.scale.mul_(2).div_(2)
        harness.before_step()
        harness.backward(module(data(6)))
        assert harness.keeper._each_step == []
        module.register_buffer("mask", torch.ones(3) * rank)  # pruning adds buffers later
        harness.keeper.refresh()
        harness.backward(module(data(6)))
        module.mask.data.add_(1)
        for _ in range(1 if harness.group.host_reads_are_free else 3):  # a GPU's host reads later
            harness.backward(module(data(6)))
        assert harness.keeper._each_step == ["mask"]
        harness.before_step()
        assert_equal_on_all_ranks({"mask": module.mask})


@both_worlds
def test_evaluation_is_not_training_and_later_buffers_are_seen(world_size):
    run_ranks(_evaluation_changes, world_size)


class Cached(nn.Module):
    """A table of positions and a mask as public models cache them: as long as the longest sample so far."""

    def __init__(self, persistent=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("table", torch.arange(3.0), persistent=persistent)
        self.register_buffer(
            "codes", torch.zeros(2, dtype=torch.int16)
        )  # sent: training changes it

    def forward(self, length, own=None):
        if length > len(self.table):
            self.table = torch.arange(float(length))
        if own is not None:
            self.register_buffer(own, torch.ones(3), persistent=False)
        self.codes.add_(length)
        return self.weight.sum() * self.table[:length].sum()


@contextlib.contextmanager
def warnings_of(logger):
    seen = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield seen
    finally:
        logging.getLogger(logger).removeHandler(handler)


def _caches(rank, world_size, lengths, mode):
    module = seeded(Cached)
    with warnings_of("lightning_dp") as seen, Harness(module, with_keeper=mode) as harness:
        for step, length in enumerate(lengths[rank]):
            module.zero_grad()
            harness.before_step()
            assert_equal_on_all_ranks({"codes": module.codes})
            own = "mask" if rank == 1 and step == 1 else None
            harness.backward(module(length, own))
            if step == 2:
                harness.keeper.before_use()
                module(length + 5 * rank)  # grows in an evaluation
                harness.keeper.refresh()
        assert len(module.table) == max(max(lengths[rank]), lengths[rank][2] + 5 * rank)
        harness.keeper.before_use()
        assert_equal_on_all_ranks({"codes": module.codes})
        # A second set-up, as when a program fits twice: said again, no error.
        left_alone = replicas.synchronize(module, harness.group)
        assert left_alone == {"table", "mask"}
    assert sum("'table'" in message for message in seen) == (2 if rank == 0 else 0)
    return seen


GROWN = {
    "at once": [[4, 4, 4, 4, 4], [9, 9, 9, 9, 9]],
    "equal first, other later": [[4, 4, 4, 4, 5], [4, 4, 4, 8, 9]],
    "on one rank": [[3, 3, 3, 3, 3], [3, 3, 3, 3, 7]],
    "in an evaluation": [[3, 3, 3, 3, 3], [3, 3, 3, 3, 3]],
}


@pytest.mark.parametrize("mode", ["lazy", "step"])
@pytest.mark.parametrize("how", GROWN)
def test_caches_that_grow_on_each_rank_are_left_alone_and_said_once(how, mode):
    run_ranks(_caches, 2, GROWN[how], mode)


def _persistent(rank, world_size):
    module = seeded(lambda: Cached(persistent=True))
    with Harness(module, with_keeper=True) as harness:
        harness.before_step()
        with pytest.raises(ReplicaMismatchError, match=r"buffer 'table' has shape \(4,\).*\(9,\)"):
            harness.backward(module(9 if rank else 4))


def test_control_a_buffer_of_checkpoints_that_grows_on_one_rank_is_an_error():
    run_ranks(_persistent, 2)


def _no_host_read(rank, world_size):
    module = seeded(lambda: nn.Sequential(Codebook("data"), nn.BatchNorm1d(8)).double())
    group = ReplicaGroup.create(torch.get_default_device(), host_reads_are_free=False)
    keeper = BufferKeeper(module, group)
    with KernelSpy() as spy:
        keeper.before_step()
        assert keeper.changed() == []
        assert not keeper.sampled_difference()
        calls, spy.reads = spy.calls, 0
        module[0].codes.data.add_(1.0 if rank else 0.0)
        keeper.before_step()
        assert keeper.changed() == []
        flag = keeper.sampled_difference()
        assert spy.reads == 0
        assert calls < 12
    assert bool(flag) == (rank == 1)
    keeper.learn([])
    assert keeper._each_step == ["0.codes"]
    with KernelSpy() as spy:  # control
        bool(flag)
    assert spy.reads == 1


def test_buffers_are_compared_without_a_host_read():
    run_ranks(_no_host_read, 2)
