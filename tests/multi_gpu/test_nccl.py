"""What only several GPUs show: overlap, memory that NCCL still reads, two communicators."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.cuda import milliseconds
from tests.support.grounds import RunIf
from tests.support.parity import Harness, assert_equal_on_all_ranks, grads, make_group, seeded
from tests.support.ranks import run_ranks

pytestmark = [RunIf(min_cuda_gpus=2), pytest.mark.usefixtures("on_ground")]


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)])


def _overlap(rank, world_size, deferred):
    """Milliseconds of a reducing step, of a local one, and of the collectives alone."""
    module = seeded(deep)
    x = torch.randn(2048, 2048)
    with Harness(module, options=None, deferred=deferred) as harness:

        def step():
            module.zero_grad()
            harness.before_step()
            harness.backward(module(x).square().mean())

        def local():
            module.zero_grad()
            with harness.window.closed():
                harness.backward(module(x).square().mean())

        whole, alone = milliseconds(step), milliseconds(local)
        flats = [bucket.allocate() for bucket in harness.reducer.layout.buckets]

        def send():
            works = [
                dist.all_reduce(f, group=harness.group.process_group, async_op=True) for f in flats
            ]
            for work in works:
                work.wait()

        return whole, alone, milliseconds(send)


def test_at_least_half_of_the_collectives_time_lies_inside_the_backward():
    whole, alone, sending = run_ranks(_overlap, 2, ())[0]
    assert whole - alone <= 0.5 * sending, (whole, alone, sending)


def test_control_buckets_that_leave_at_the_end_do_not_overlap():
    whole, alone, sending = run_ranks(_overlap, 2, ("*",))[0]
    assert whole - alone > 0.5 * sending, (whole, alone, sending)


def _reused(rank, world_size, keeps_rules):
    """Rank 1 comes late: rank 0's collective, too large to be sent ahead, waits with its memory."""
    module = seeded(lambda: nn.Linear(4096, 4096))
    with Harness(module) as harness:
        harness.backward(module(torch.ones(1, 4096)).sum())
        (*_, bucket) = sorted(harness.reducer.layout.buckets, key=lambda bucket: bucket.numel)
        module.zero_grad()
        flat = bucket.allocate()
        flat.fill_(float(rank + 1))
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
        work = harness.reducer.wire.launch(bucket)
        if rank == 0 and keeps_rules:
            shape, flat = flat.shape, None
            bucket.abandon()  # its memory goes back, as far as NCCL lets it
            others = [torch.full(shape, float("nan")) for _ in range(4)]
            assert len(others) == 4
        elif rank == 0:
            with torch.cuda.stream(torch.cuda.Stream()):
                flat.fill_(float("nan"))
        work.wait()
        torch.cuda.synchronize()
        return (
            None if flat is None else (flat.isnan().any().item(), flat.nan_to_num().mean().item())
        )


def test_memory_of_a_bucket_is_not_reused_while_a_collective_reads_it():
    spoilt, mean = run_ranks(_reused, 2, True)[1]
    assert not spoilt
    assert mean == pytest.approx(1.5)


def test_control_memory_that_is_written_in_flight_is_seen():
    assert any(spoilt for spoilt, _ in run_ranks(_reused, 2, False))


def _communicators(rank, world_size):
    """A user's collectives on the default group come at another place in the backward on each rank."""
    module = seeded(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]))
    totals = []
    at = 1 if rank == 0 else 6

    def of_the_user(_):
        total = torch.ones(256)
        dist.all_reduce(total)
        totals.append(total)

    module[at].weight.register_hook(of_the_user)
    with Harness(module) as harness:
        for index in range(10):
            torch.manual_seed(10 * index + rank)
            module.zero_grad()
            harness.backward(module(torch.randn(4, 256)).square().mean())
            assert_equal_on_all_ranks(grads(module))
    return [total.mean().item() for total in totals]


def test_a_users_collectives_and_the_engines_use_two_communicators():
    assert run_ranks(_communicators, 2) == [[2.0] * 10] * 2


def _mean(rank, world_size):
    """NCCL averages by itself; the control block's counts survive."""
    group = make_group()
    value = torch.full((1000,), float(rank))
    group.all_reduce_mean(value)
    return value.mean().item(), group.waits_on_host, group.host_reads_are_free


def test_nccl_averages_and_waits_on_the_stream():
    assert run_ranks(_mean, 2) == [(0.5, False, False)] * 2
