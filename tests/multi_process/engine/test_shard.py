"""Sums in equal slices: the halves apart and together, bits by rank order, nothing lost or left over."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dp.engine.bucket import Bucket, Slicing, Slot
from lightning_dp.engine.wires import codec, shard
from lightning_dp.engine.wires.codec import Half, Int8, add_rows
from lightning_dp.engine.wires.shard import ShardWire
from tests.support.nets import branches, data
from tests.support.parity import Harness, make_group, seeded
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = pytest.mark.multi_process
SIZES = ([1], [5, 3], [40, 7, 1], [1000, 513], [70_000])


def make_bucket(index: int, sizes, dtype, slicing) -> Bucket:
    slots = [
        Slot(i, f"{index}.{i}", nn.Parameter(torch.zeros(n, dtype=dtype)))
        for i, n in enumerate(sizes)
    ]
    bucket = Bucket(index, slots, dtype, torch.device("cpu"), slicing)
    bucket.allocate()
    return bucket


def fill(bucket: Bucket, seed: int) -> torch.Tensor:
    """Noise in the slots; returns a copy of all gradients."""
    torch.manual_seed(seed)
    for slot in bucket.slots:
        slot.view.copy_(torch.randn(slot.numel))
    return bucket.grads.clone()


def of_all_ranks(mine: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)


def in_rank_order(rows: torch.Tensor) -> torch.Tensor:
    wide = rows.float() if rows.dtype in codec.HALF else rows
    total = wide[0].clone()
    for row in wide[1:]:
        total += row
    return total.to(rows.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_slices_are_equal_whole_vectors_and_padded_with_zeros(dtype, count):
    for sizes in SIZES:
        bucket = make_bucket(0, sizes, dtype, Slicing(count))
        assert bucket.slice_numel * count == bucket.grad_numel
        assert bucket.slice_numel * dtype.itemsize % 64 == 0
        assert all(offset * dtype.itemsize % 64 == 0 for offset in bucket.offsets)
        for slot in bucket.slots:
            slot.view.zero_()
        assert not bucket.grads.any(), "what no slot covers is zero"
        bucket.grads[(count - 1) * bucket.slice_numel :].fill_(1)
        assert bucket.grads.sum() == bucket.slice_numel
        assert not bucket.flags.any()
        assert make_bucket(0, sizes, dtype, Slicing(count, 256)).slice_numel % 256 == 0


def _halves(rank, world_size):
    wire = ShardWire.connect(make_group())
    first_half = ShardWire.connect(wire.group, gathers=False)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        buckets = [make_bucket(i, sizes, dtype, wire.slicing) for i, sizes in enumerate(SIZES)]
        expected = []
        for number, bucket in enumerate(buckets):
            expected.append(in_rank_order(of_all_ranks(fill(bucket, 10 * rank + number))))
        for number, bucket in enumerate(buckets):
            fill(bucket, 10 * rank + number)
        for each in reversed([wire.launch(bucket) for bucket in buckets]):
            each.wait()
        for bucket, total in zip(buckets, expected, strict=True):
            assert torch.equal(bucket.grads, total), (dtype, bucket.grad_numel)
        before = [fill(bucket, 10 * rank + number) for number, bucket in enumerate(buckets)]
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            slot.sliced = True
        for each in [first_half.launch(bucket) for bucket in buckets]:
            each.wait()
        for bucket, local, total in zip(buckets, before, expected, strict=True):
            n = bucket.slice_numel
            local[rank * n : (rank + 1) * n] = total[rank * n : (rank + 1) * n]
            assert torch.equal(bucket.grads, local), "the rest stays this rank's own"
        for bucket in buckets:
            own = bucket.grads.view(world_size, -1)[rank]
            shard.all_gather(bucket.grads, own, wire.gather_group).wait()
        assert all(torch.equal(b.grads, t) for b, t in zip(buckets, expected, strict=True))
    first_half.close()
    wire.close()


@both_worlds
def test_the_halves_together_are_the_sum_in_rank_order_and_apart_what_a_sharded_step_needs(
    world_size,
):
    run_ranks(_halves, world_size)


def test_half_types_are_added_in_fp32_and_rounded_once():
    rows = torch.cat([torch.full((1, 4), 256.0), torch.ones(9, 4)]).bfloat16()
    out = torch.empty(4, dtype=torch.bfloat16)
    add_rows(rows, out)
    assert out.tolist() == [torch.tensor(265.0).bfloat16()] * 4 == [264.0] * 4
    control = rows[0].clone()
    for row in rows[1:]:
        control += row
    assert control.tolist() == [256.0] * 4, "control: in bf16 the ones are lost"


def _bounded(rank, world_size):
    wire = ShardWire.connect(make_group())
    most = []
    original = dist.all_to_all_single

    def counted(*args, **kwargs):
        work = original(*args, **kwargs)
        most.append(len(wire._reducing) + 1)
        return work

    dist.all_to_all_single = counted
    shard.RECEIVE_BYTES = 2 * 70_000 * 4 + 1000
    if rank == 0:
        torch.manual_seed(0)
    buckets = [make_bucket(i, [70_000], torch.float32, wire.slicing) for i in range(12)]
    for bucket in buckets:
        fill(bucket, rank)
    works = [wire.launch(bucket) for bucket in buckets]
    works[-1].wait()
    works[0].wait()
    assert all(torch.equal(bucket.grads, buckets[0].grads) for bucket in buckets)
    assert sum(map(len, wire._spare.values())) <= 2, "memory is used again"
    return max(most), len(most)


def test_memory_for_what_is_received_is_bounded():
    assert all(most <= 2 and calls == 12 for most, calls in run_ranks(_bounded, 2))


def _counted(rank, world_size):
    module = seeded(branches)
    with Harness(module, wire=ShardWire.connect) as harness:
        for step in range(3):
            module.zero_grad()
            loss = module(data(), use=rank == 0).square().mean()
            if step == 0:
                harness.backward(loss)
                continue
            n = len(harness.reducer.layout.buckets)
            with CollectiveSpy().expecting(alltoall_base=n, _allgather_base=n, allreduce=1):
                harness.backward(loss)


def test_two_collectives_a_bucket_and_one_small_message_a_step():
    run_ranks(_counted, 2)


class FakeStream:
    """A stream on the CPU: what it is told, in order."""

    def __init__(self):
        self.told = []

    def wait_stream(self, other):
        self.told.append("waits for the gradients")

    def record_event(self):
        self.told.append("event")
        return mock.Mock(query=lambda: True)


def _on_a_stream(rank, world_size):
    """As with NCCL: everything is queued at launch, in one stream; nothing is left to the host."""
    stream, group = FakeStream(), make_group()
    streams = mock.Mock(current_stream=FakeStream, stream=lambda _: contextlib.nullcontext())
    for codec_ in (None, Half(torch.bfloat16), Int8()):
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for queued in (False, True):
                wire = ShardWire.connect(group, codec=codec_)
                bucket = make_bucket(0, [5000, 3], dtype, wire.slicing)
                fill(bucket, rank)
                with (
                    mock.patch.object(torch.Tensor, "record_stream", create=True) as recorded,
                    mock.patch.object(torch, "cuda", streams),
                ):
                    wire._stream = stream if queued else None
                    wire.launch(bucket).wait()
                    assert recorded.called == queued
                assert not any((wire._queued, wire._reducing, wire._gathering))
                found.append(bucket.grads.clone())
                wire.close()
            assert torch.equal(*found), (codec_, dtype)
    assert stream.told == ["waits for the gradients", "event"] * 6


def test_on_a_stream_the_bits_are_the_same():
    run_ranks(_on_a_stream, 2)


class Stop(Exception):
    """Raised by a signal handler."""


def _in_the_midst(rank, world_size):
    wire = ShardWire.connect(make_group(), gathers=False)
    bucket = make_bucket(0, [100], torch.float32, wire.slicing)
    bucket.slots[0].sliced = True
    if rank == 1:

        def stop(*_):
            raise Stop

        shard.add_rows = stop
        with pytest.raises(Stop):
            wire.launch(bucket).wait()
        with pytest.raises(RuntimeError, match="interrupted in the midst of a sum"):
            wire.launch(bucket)
        return
    work = wire.launch(bucket)
    work.wait()
    assert work.is_completed()


def test_a_rank_interrupted_in_the_midst_of_a_sum_starts_nothing_more():
    run_ranks(_in_the_midst, 2)
