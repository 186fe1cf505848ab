"""What this group's link was measured to be; :mod:`lightning_dp.engine.plan.cost` makes sizes of it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.cost import MIB, Link
from lightning_dp.engine.waiting import interruptible_wait

SMALL_BYTES = 16 * 1024
SMALL_MESSAGES = 8
LARGE = 2, MIB  # messages, bytes of each
FAST_S = (
    0.02  # where ``LARGE`` took less, ``LARGER`` is sent, which a processor's cache does not hold
)
LARGER = 6, 2 * MIB
MEASURE_S = 0.05  # of each kind of message, and at least once
MOST_REPEATS = 12


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
            interruptible_wait(work)
        return time.perf_counter() - begin, time.process_time() - cpu

    first, _ = once()  # also sets up connections and memory
    repeats = group.broadcast_object(max(1, min(MOST_REPEATS, int(MEASURE_S / first))))
    return min(once() for _ in range(repeats))
