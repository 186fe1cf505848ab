"""What a message and a step cost: the model behind automatic bucket sizes and behind ``lean-ddp plan``.

A bucket can leave when its last gradient has arrived and its predecessors have left. Several are under
way at once: each keeps the wire for ``gap_s + bytes * s_per_byte``, and arrives ``latency_s`` later. The
last one, which carries the control block, leaves when the backward has ended. What finishes after that is
exposed. Large buckets leave much to wait for at the end, small ones pay a gap each: the model is asked
for a few sizes, and the layout is fixed by what it answers.

Numbers only: nothing here measures or communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_dp.engine.plan.cut import SlotSpec, plan_buckets

MIB = 2**20
CAPS_MIB = (25.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5)
DEFAULT_CAPS = int(CAPS_MIB[0] * MIB), MIB, MIB
AT_ONCE = 4  # messages that are under way together
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
    arrivals_s: Sequence[float],
    specs: Sequence[SlotSpec],
    backward_s: float,
    link: Link,
    sizes_mib: Sequence[float] = CAPS_MIB,
    message_s: float = HOST_S_PER_BUCKET,
) -> Choice:
    """Pick the bucket sizes that are expected to cost least; never expected to cost more than 25 MiB.

    Args:
        arrivals_s: When each slot's gradient arrived, seconds since the backward began, ascending.
        specs: The slots, in the same order.
        backward_s: How long the backward took.
        link: What a message costs.
        sizes_mib: Which sizes there are, the largest first.
        message_s: What each message takes from the backward.
    """

    def cost(caps: tuple[int, int, int]) -> tuple[float, float]:
        wait, count = expected_wait_s(arrivals_s, specs, backward_s, link, caps)
        # What the wire does on the processor is not hidden beside the backward: it makes that longer.
        return wait * (1 - link.busy) + count * message_s, wait

    best = DEFAULT_CAPS
    best_cost, default_wait = cost(best)
    best_wait = default_wait
    for caps in _candidates(sizes_mib):
        total, wait = cost(caps)
        if total < best_cost - WORTH * backward_s:
            best, best_cost, best_wait = caps, total, wait
    return Choice(best, best_wait, default_wait)


def _candidates(sizes_mib: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """Sizes to be asked for, the fewest messages first."""
    for cap in (int(mib * MIB) for mib in sizes_mib):
        for first in dict.fromkeys((cap, min(cap, MIB))):
            for last in dict.fromkeys(min(cap, size) for size in (MIB, MIB // 4, MIB // 16)):
                yield cap, first, last


@dataclass(frozen=True)
class Fabric:
    """What joins ranks: some on each host, hosts by one link each.

    Attributes:
        bandwidth: Bytes a second of a host's link, in each direction, that gradients get.
        latency_s: Seconds of one message between hosts.
        ranks_per_host: How many share a host and its link.
        inner_bandwidth: Bytes a second that each rank of a host gets to another one.
        inner_latency_s: Seconds of one message inside a host.
        inner_busy: Share of the time inside a host in which a processor is needed; 1 in shared memory.
        cpu_s_per_byte: Processor seconds for each byte that a rank sends and receives.
        message_s: What each message takes from the backward, wherever it runs.
    """

    bandwidth: float
    latency_s: float
    ranks_per_host: int = 1
    inner_bandwidth: float = math.inf
    inner_latency_s: float = 0.0
    inner_busy: float = 0.0
    cpu_s_per_byte: float = 0.0
    message_s: float = 0.0

    def link(self, ranks: int, share: float = 1.0) -> Link:
        """What an all-reduce over ``ranks`` costs: a ring inside of each host, then one between hosts.

            latency   2 (m - 1) a1 + 2 (n - 1) a2,   m ranks on each of n hosts
            a byte    max(2 (m - 1) / (m b1), 2 (n - 1) / (n b2))

        The longer of the two decides: one bucket is inside of a host while another one is between hosts.

        Args:
            ranks: Over all hosts.
            share: 1 for an all-reduce, 0.5 for a reduce-scatter or an all-gather.
        """
        if ranks == 1:
            return Link(0.0, 0.0)
        inside = min(ranks, self.ranks_per_host)
        hosts = math.ceil(ranks / self.ranks_per_host)
        steps_in, steps_out = 2 * share * (inside - 1), 2 * share * (hosts - 1)
        latency_s = steps_in * self.inner_latency_s + steps_out * self.latency_s
        between = steps_out / hosts / self.bandwidth
        s_per_byte = max(steps_in / inside / self.inner_bandwidth, between)
        if hosts == 1:
            busy = self.inner_busy
        else:
            cpu = 2 * share * (ranks - 1) / ranks * self.cpu_s_per_byte
            s_per_byte = max(s_per_byte, cpu)
            busy = cpu / s_per_byte if cpu else 0.0
        return Link(latency_s, s_per_byte, latency_s / AT_ONCE, busy)


@dataclass(frozen=True)
class Line:
    """``y = start + slope * x`` through measured points: steps over ranks, or over accumulation.

    Source: published tables of weak scaling are straight lines in the number of ranks, and those of
    accumulation at a fixed batch in the number of micro-batches.

    Attributes:
        start: ``y`` at 0.
        slope: More ``y`` for each ``x``.
        reach: The smallest and the largest ``x`` that were measured.
        error: Of one point, relative.
    """

    start: float
    slope: float
    reach: tuple[float, float]
    error: float

    # Of a point that was fitted, where points are too few to tell.
    LEAST_ERROR: ClassVar[float] = 0.015
    SPREADS: ClassVar[float] = 2.5

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line with the least squared relative error.

        Args:
            points: At least two, ``x`` and ``y`` above 0.
        """
        weights = [1 / y**2 for _, y in points]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
        spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
        rises = sum(w * (x - mean_x) * y for w, (x, y) in zip(weights, points, strict=True))
        slope = rises / spread
        start = mean_y - slope * mean_x
        left = [(start + slope * x) / y - 1 for x, y in points]
        error = math.sqrt(sum(e * e for e in left) / max(1, len(points) - 2))
        return cls(start, slope, (min(x for x, _ in points), max(x for x, _ in points)), error)

    def at(self, x: float) -> tuple[float, float, float]:
        """``y`` at ``x``, and its interval, which widens with each doubling beyond what was measured."""
        y = self.start + self.slope * x
        beyond = max(1.0, x / self.reach[1], self.reach[0] / x if x else math.inf)
        margin = max(self.LEAST_ERROR, self.SPREADS * self.error) * (1 + math.log2(beyond))
        return y, y * (1 - margin), y * (1 + margin)
