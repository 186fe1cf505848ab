"""Automatic bucket sizes: what this link and this backward were measured to be, put into a small model.

A bucket can leave when its last gradient has arrived and its predecessors have left. Several are under
way at once: each keeps the wire for ``gap_s + bytes * s_per_byte``, and arrives ``latency_s`` later. The
last one, which carries the control block, leaves when the backward has ended. What finishes after that is
exposed. Large buckets leave much to wait for at the end, small ones pay a gap each: the model is asked
for a few sizes, and the layout is fixed by what it answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.cut import SlotSpec, plan_buckets
from lightning_dp.engine.waiting import interruptible_wait

MIB = 2**20
CAPS_MIB = (25.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5)
SMALL_BYTES = 16 * 1024
SMALL_MESSAGES = 8
LARGE = 2, MIB  # messages, bytes of each
FAST_S = (
    0.02  # where ``LARGE`` took less, ``LARGER`` is sent, which a processor's cache does not hold
)
LARGER = 6, 2 * MIB
MEASURE_S = 0.05  # of each kind of message, and at least once
MOST_REPEATS = 12
# What a message costs the backward besides the wire: calls, wake-ups of gloo's threads, their traces in the
# processor's caches. Measured on one core a rank: 0.4 to 0.9 ms.
HOST_S_PER_BUCKET = 5e-4
# A larger bucket is preferred unless a smaller one is expected to save at least this share of a backward.
WORTH = 0.003


@dataclass(frozen=True)
class Link:
    """What an all-reduce of this group costs.

    Attributes:
        latency_s: Seconds that it takes whatever its size, while others may be under way.
        s_per_byte: Seconds a byte, for which it keeps the others waiting.
        gap_s: Seconds a message for which it does so, whatever its size.
        busy: Share of the wire's time in which it needs a processor. While the backward needs the same
            one, the wire is slower by that much.
    """

    latency_s: float
    s_per_byte: float
    gap_s: float = 0.0
    busy: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Expected seconds for which one all-reduce keeps the wire, undisturbed."""
        return self.gap_s + nbytes * self.s_per_byte

    def coded(self, ratio: float) -> Link:
        """The same link for messages of which ``ratio`` of the bytes are sent."""
        return replace(self, s_per_byte=self.s_per_byte * ratio)

    def end_s(self, start_s: float, nbytes: int, backward_s: float) -> float:
        """When an all-reduce that starts at ``start_s`` lets go of the wire; the backward disturbs it."""
        work = self.seconds(nbytes)
        beside = max(0.0, backward_s - start_s)
        disturbed = work * (1 + self.busy)
        if disturbed <= beside:
            return start_s + disturbed
        return start_s + beside + work - beside / (1 + self.busy)


@dataclass(frozen=True)
class Choice:
    """A layout and what was expected of it.

    Attributes:
        caps: Most bytes of a bucket, of the first, of the last.
        exposed_s: Expected wait after the backward.
        exposed_default_s: The same for torch's default of 25 MiB.
    """

    caps: tuple[int, int, int]
    exposed_s: float
    exposed_default_s: float


def measure_link(group: ReplicaGroup) -> Link:
    """Time all-reduces: a small one, several small ones and several large ones under way together.

    Collective: every rank, between two steps, once. Blocks, for 0.2 s or, on a slow link, until 4.5 MiB
    have been sent.
    """
    small, _ = _fastest(group, SMALL_MESSAGES, SMALL_BYTES)
    one = min(small, _fastest(group, 1, SMALL_BYTES)[0])
    count, size = LARGE
    large, cpu = _fastest(group, count, size)
    if group.broadcast_object(large < FAST_S):
        count, size = LARGER
        large, cpu = _fastest(group, count, size)
    gap = max(0.0, small - one) / (SMALL_MESSAGES - 1)
    slope = max(0.0, large - one - (count - 1) * gap) / (count * size - SMALL_BYTES)
    return Link(
        max(1e-5, one - slope * SMALL_BYTES),
        slope,
        max(0.0, gap - slope * SMALL_BYTES),
        min(1.0, cpu / large),
    )


def _fastest(group: ReplicaGroup, messages: int, nbytes: int) -> tuple[float, float]:
    """Time ``messages`` all-reduces that are started together; the best of a few.

    Returns:
        Seconds until all were done, and this process's processor seconds meanwhile.
    """
    payloads = [torch.zeros(nbytes // 4, device=group.device) for _ in range(messages)]

    def once() -> tuple[float, float]:
        begin, cpu = time.perf_counter(), time.process_time()
        works = [
            dist.all_reduce(payload, group=group.process_group, async_op=True)
            for payload in payloads
        ]
        for work in works:
            if work is not None:
                interruptible_wait(work)
        return time.perf_counter() - begin, time.process_time() - cpu

    first, _ = once()  # also sets up connections and memory
    repeats = group.broadcast_object(max(1, min(MOST_REPEATS, int(MEASURE_S / first))))
    return min(once() for _ in range(repeats))


def expected_wait_s(
    arrivals_s: Sequence[float],
    specs: Sequence[SlotSpec],
    backward_s: float,
    link: Link,
    caps: tuple[int, int, int],
) -> tuple[float, int]:
    """Return the wait after the backward under one layout, and its number of buckets.

    Args:
        arrivals_s: When each slot's gradient arrived, seconds since the backward began.
        specs: The slots, in the same order.
        backward_s: How long the backward took.
        link: What a message costs.
        caps: Most bytes of a bucket, of the first, of the last.
    """
    position = {spec.index: place for place, spec in enumerate(specs)}
    plan = plan_buckets(specs, *caps)
    free = left = 0.0
    for number, bucket in enumerate(plan):
        ready = max(arrivals_s[position[index]] for index in bucket)
        left = backward_s if number == len(plan) - 1 else max(left, ready)
        nbytes = sum(specs[position[index]].nbytes for index in bucket)
        free = link.end_s(max(free, left), nbytes, backward_s)
    return max(0.0, free + link.latency_s - backward_s), len(plan)


def choose(
    arrivals_s: Sequence[float], specs: Sequence[SlotSpec], backward_s: float, link: Link
) -> Choice:
    """Pick the bucket sizes that are expected to cost least; never expected to cost more than 25 MiB.

    Args:
        arrivals_s: When each slot's gradient arrived, seconds since the backward began, ascending.
        specs: The slots, in the same order.
        backward_s: How long the backward took.
        link: What a message costs.
    """

    def cost(caps: tuple[int, int, int]) -> tuple[float, float]:
        wait, count = expected_wait_s(arrivals_s, specs, backward_s, link, caps)
        # What the wire does on the processor is not hidden beside the backward: it makes that longer.
        return wait * (1 - link.busy) + count * HOST_S_PER_BUCKET, wait

    best = int(CAPS_MIB[0] * MIB), MIB, MIB
    best_cost, default_wait = cost(best)
    best_wait = default_wait
    for caps in _candidates():
        total, wait = cost(caps)
        if total < best_cost - WORTH * backward_s:
            best, best_cost, best_wait = caps, total, wait
    return Choice(best, best_wait, default_wait)


def _candidates() -> Iterator[tuple[int, int, int]]:
    """Sizes to be asked for, the fewest messages first."""
    for cap in (int(mib * MIB) for mib in CAPS_MIB):
        for first in dict.fromkeys((cap, min(cap, MIB))):
            for last in dict.fromkeys(min(cap, size) for size in (MIB, MIB // 4, MIB // 16)):
                yield cap, first, last
