"""Gradients are stored once, by torch's own count of allocations. ddp: twice, by default."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from benchmarks.memory import traced_fit
from lightning_dp.engine.bucket import ALIGN_BYTES, RELEASE_BYTES, Bucket, Slot
from lightning_dp.engine.control import CONTROL_SIZE
from tests.support.trainers import ranks

pytestmark = pytest.mark.multi_process


def _traced(rank, world_size, port, name):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), KINETO_LOG_LEVEL="99")
    gradients, held, peak = traced_fit(name, "gpt", world_size)
    return held / gradients, peak / gradients


def test_gradients_and_buckets_are_one_times_the_gradients_between_steps():
    found = {name: ranks(_traced, 2, name)[0] for name in ("lean", "ddp", "alone")}
    held = {name: each[0] for name, each in found.items()}
    peak = {name: each[1] for name, each in found.items()}
    assert 1.0 <= held["lean"] <= 1.05, held
    assert held["ddp"] > 1.9, "control: the count sees what exists twice"
    assert peak["lean"] <= peak["alone"] + 0.5, peak
    assert peak["ddp"] >= peak["alone"] + 0.9, "control: buckets beside the gradients"


def test_bytes_of_a_bucket():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5, 1000)]
    slots = [Slot(i, str(i), p) for i, p in enumerate(parameters)]
    bucket = Bucket(0, slots, torch.float32, torch.device("cpu"))
    aligned = ALIGN_BYTES // 4
    padded = sum(-(-p.numel() // aligned) * aligned for p in parameters)
    assert bucket.numel == padded + len(slots) + CONTROL_SIZE
    assert bucket.nbytes == 4 * bucket.numel
    assert not bucket.worth_releasing
    flat = bucket.allocate()
    assert flat.untyped_storage().nbytes() == bucket.nbytes
    flat[: bucket.grad_numel].fill_(7)
    outside = torch.ones(bucket.numel, dtype=torch.bool)
    for slot in slots:
        assert slot.view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        slot.view.zero_()
        begin = slot.view.storage_offset()
        assert begin % aligned == 0
        outside[begin : begin + slot.numel] = False
    assert int((flat == 7).sum()) == int(outside[: bucket.grad_numel].sum()), (
        "padding, and only that"
    )
    parameters[0].grad = slots[0].grad_view
    assert not bucket.release(), "a gradient lives in it"
    parameters[0].grad = None
    assert bucket.release()
    assert not bucket.allocate()[outside].any(), "padding, flags and tail begin as zeros"
    large = [Slot(0, "w", nn.Parameter(torch.zeros(RELEASE_BYTES // 4)))]
    assert Bucket(0, large, torch.float32, torch.device("cpu")).worth_releasing
