"""Planning buckets is arithmetic: every slot once, sizes within the cap, order by last arrival."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_dp.engine.bucket import Bucket, Slot, is_dense
from lightning_dp.engine.control import CONTROL_SIZE
from lightning_dp.engine.plan.cut import SlotSpec, plan_buckets

sizes = st.lists(st.integers(1, 400), min_size=0, max_size=60)


def specs_of(numbers, keys):
    return [SlotSpec(index, n, (keys[index % len(keys)],)) for index, n in enumerate(numbers)]


@settings(max_examples=200, deadline=None)
@given(
    sizes,
    st.lists(st.sampled_from("ab"), min_size=1, max_size=5),
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(1, 600),
)
def test_every_slot_once_within_the_cap_in_order_of_last_arrival(numbers, keys, cap, first, last):
    specs = specs_of(numbers, keys)
    plan = plan_buckets(specs, cap, min(first, cap), min(last, cap))
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(numbers)))
    for bucket in plan:
        assert bucket == sorted(bucket), "inside a bucket: order of arrival"
        assert len({specs[index].key for index in bucket}) == 1, "one key a bucket"
        total = sum(numbers[index] for index in bucket)
        without_the_last = total - numbers[bucket[-1]]
        assert without_the_last < cap, "a full bucket takes nothing more"
        assert total <= 1.5 * cap or 2 * without_the_last < cap, "half full is enough"
    assert [max(bucket) for bucket in plan] == sorted(max(bucket) for bucket in plan)


def test_the_first_and_the_last_bucket_are_small():
    plan = plan_buckets(specs_of([10] * 20, "a"), cap_bytes=60, first_bytes=20, last_bytes=30)
    assert [len(bucket) for bucket in plan] == [2, 6, 6, 3, 3]


def test_a_weight_at_the_cap_takes_its_bias_along():
    plan = plan_buckets(
        specs_of([1000, 1] * 6, "a"), cap_bytes=1000, first_bytes=1000, last_bytes=1
    )
    assert [len(bucket) for bucket in plan] == [1, 2, 2, 2, 2, 2, 1]


def test_views_have_the_parameters_strides_and_do_not_overlap():
    params = [
        nn.Parameter(torch.randn(3, 4)),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 5).t()),
        nn.Parameter(torch.randn(2, 3, dtype=torch.complex64)),
        nn.Parameter(torch.randn(1)),
    ]
    slots = [Slot(i, str(i), p) for i, p in enumerate(params)]
    bucket = Bucket(0, slots, torch.float32, torch.device("cpu"))
    flat = bucket.allocate()
    for number, slot in enumerate(slots, 1):
        assert slot.view is not None
        slot.view.fill_(number)
        assert slot.grad_view is not None
        assert slot.grad_view.shape == slot.param.shape
        if not slot.param.is_complex():
            assert slot.grad_view.stride() == slot.param.stride()
        assert slot.view.data_ptr() % 16 == 0
    for number, slot in enumerate(slots, 1):
        assert slot.view is not None
        assert (slot.view == number).all(), "no slot writes into another"
    assert bucket.flags.numel() == len(slots)
    assert bucket.control.numel() == CONTROL_SIZE
    assert flat.numel() == bucket.numel


def test_dense_means_no_gaps_and_no_overlaps():
    assert is_dense(torch.empty(3, 4).t())
    assert is_dense(torch.empty(2, 1, 4))
    assert is_dense(torch.empty(()))
    assert not is_dense(torch.empty(4, 4)[:, :2])
    assert not is_dense(torch.empty(4, 1).expand(4, 3))


def test_release_keeps_what_somebody_else_holds():
    slot = Slot(0, "w", nn.Parameter(torch.ones(4)))
    bucket = Bucket(0, [slot], torch.float32, torch.device("cpu"))
    bucket.allocate()
    slot.param.grad = slot.grad_view
    assert not bucket.release(), "a gradient lives in it"
    kept = slot.param.grad
    slot.param.grad = None
    assert bucket.release()
    assert bucket.flat is None
    kept.fill_(2)
    assert kept.sum() == 8
