"""The model behind automatic bucket sizes."""

from __future__ import annotations

import random
import re

import pytest
import torch

from lightning_dp.engine.plan.advice import Backward, advice, coding_s_per_byte, gains
from lightning_dp.engine.plan.cost import (
    CAPS_MIB,
    HOST_S_PER_BUCKET,
    MIB,
    Link,
    choose,
    expected_wait_s,
)
from lightning_dp.engine.plan.cut import SlotSpec
from lightning_dp.engine.wires.codec import Half, Int8

CODECS = [Half(torch.bfloat16), Int8()]
GBIT = Link(latency_s=3e-4, s_per_byte=8e-9)
FAST = Link(latency_s=2e-5, s_per_byte=1 / 200e9)


def layers(count=50, mib=0.5, backward_s=0.24):
    """Equal layers whose gradients arrive evenly."""
    specs = [SlotSpec(i, int(mib * MIB), ("f",)) for i in range(count)]
    return [backward_s * (i + 1) / count for i in range(count)], specs, backward_s


def test_one_bucket_is_exposed_whole():
    arrivals, specs, backward_s = layers(4)
    wait, count = expected_wait_s(arrivals, specs, backward_s, GBIT, (100 * MIB,) * 3)
    assert count == 1
    assert wait == pytest.approx(GBIT.latency_s + GBIT.seconds(2 * MIB))


def test_a_wire_that_keeps_up_exposes_the_last_bucket_only():
    arrivals, specs, backward_s = layers()
    link = Link(1e-4, 1e-10, gap_s=1e-5)
    wait, count = expected_wait_s(arrivals, specs, backward_s, link, (MIB // 2,) * 3)
    assert count == 50
    assert wait == pytest.approx(link.latency_s + link.seconds(MIB // 2))


def test_a_slow_link_gets_small_buckets():
    choice = choose(*layers(), GBIT)
    assert choice.caps[0] <= 4 * MIB
    assert choice.exposed_s < 0.5 * choice.exposed_default_s


def test_a_fast_link_keeps_large_ones():
    choice = choose(*layers(), FAST)
    assert choice.caps[0] == 25 * MIB


def test_a_wire_that_needs_the_processor_is_slower_beside_the_backward():
    link = Link(0.0, 1e-8, gap_s=0.0, busy=0.5)  # 10 ms for a million bytes
    assert link.end_s(0.0, 1_000_000, backward_s=1.0) == pytest.approx(0.015)
    assert link.end_s(1.0, 1_000_000, backward_s=1.0) == pytest.approx(1.01)
    # Half of it done beside the backward, in 7.5 ms, the rest after it.
    assert link.end_s(0.0, 1_000_000, backward_s=0.0075) == pytest.approx(0.0125)
    calm = Link(0.0, 1e-8, gap_s=0.0)
    assert calm.end_s(0.0, 1_000_000, backward_s=0.0075) == pytest.approx(0.01)


def test_hiding_work_of_the_processor_gains_nothing():
    arrivals, specs, backward_s = layers()
    wire, processor = (Link(2e-4, 5e-10, gap_s=1e-4, busy=busy) for busy in (0.0, 1.0))
    assert choose(arrivals, specs, backward_s, wire).caps[0] < 25 * MIB
    assert choose(arrivals, specs, backward_s, processor).caps[0] == 25 * MIB


def test_messages_that_block_each_other_speak_against_small_buckets():
    slow_to_start = Link(latency_s=2e-2, s_per_byte=1e-10, gap_s=2e-2)
    assert choose(*layers(), slow_to_start).caps[0] >= 8 * MIB


def test_latency_that_is_paid_in_parallel_does_not():
    far_away = Link(latency_s=2e-2, s_per_byte=8e-9)
    assert choose(*layers(), far_away).caps[0] <= 4 * MIB


@pytest.mark.parametrize("seed", range(30))
def test_never_expected_worse_than_25_mib(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 200)
    specs = [SlotSpec(i, draw.randint(100, 8 * MIB), (draw.choice("ab"),)) for i in range(count)]
    backward_s = draw.uniform(0.001, 1.0)
    arrivals = sorted(draw.uniform(0, backward_s) for _ in range(count))
    link = Link(
        *(10 ** draw.uniform(*exponents) for exponents in ((-5, -2), (-11.5, -7), (-6, -2)))
    )
    choice = choose(arrivals, specs, backward_s, link)

    def cost(caps):
        wait, count = expected_wait_s(arrivals, specs, backward_s, link, caps)
        return wait + count * HOST_S_PER_BUCKET

    assert cost(choice.caps) <= cost((25 * MIB, MIB, MIB)) + 1e-12
    assert choice.caps[0] / MIB in CAPS_MIB


def advised(
    link: Link, dtype: torch.dtype = torch.float32, cost: float | None = None
) -> str | None:
    arrivals, specs, backward_s = layers()
    specs = [SlotSpec(spec.index, spec.nbytes, (str(dtype),)) for spec in specs]
    backward = Backward(arrivals, specs, backward_s)
    wait = choose(arrivals, specs, backward_s, link).exposed_s
    costs = {c: coding_s_per_byte(c, 2) if cost is None else cost for c in CODECS}
    return advice(gains(backward, link, wait, costs), wait, backward_s)


def test_L6_a_slow_link_is_advised_to_round_and_a_fast_one_is_not():
    # 25 MiB: a second at 200 Mbit/s, beside 0.24 s of backward
    text = advised(Link(3e-4, 8 / 200e6))
    assert text is not None
    bf16, int8 = (float(ms) for ms in re.findall(r"save about (\d+) ms", text))
    assert 400 < bf16 < 530
    assert 600 < int8 < 800
    assert re.findall(r"\((\d+)%\)", text)[1] > "55"
    assert advised(FAST) is None, "loopback: coding costs more than is waited for"


def test_L6_what_coding_costs_counts_and_so_does_what_no_codec_can_round():
    slow = Link(3e-4, 8 / 200e6)
    assert advised(slow, cost=0.0) is not None
    assert advised(slow, cost=1.0 / (25 * MIB)) is None, "a second of coding a step"
    assert advised(slow, torch.bfloat16) is None, "a half-precision model sends half types already"
