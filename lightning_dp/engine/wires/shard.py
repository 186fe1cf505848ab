"""Sum a bucket in equal slices, one a rank: an all-reduce in two halves that can be used apart.

[Note: two halves] ``reduce`` sends slice ``k`` of every rank to rank ``k`` (all-to-all), which adds
them in the order of ranks; ``gather`` sends the sums to everybody (all-gather). Together they send what
an all-reduce sends, ``2 (K - 1) / K`` of the bucket, and every rank ends with the same bytes, because
each number was added up once. A sharded optimizer uses the first half for gradients and the second one
for parameters.

[Note: two groups] When a sum is ready differs between ranks, so the second halves would mix with the
first ones in another order on each rank. They have a process group of their own: within each, the order
is that of launches on every rank.

[Note: what travels apart] Only gradients are cut, at ``Bucket.slice``: slots begin at 64 bytes, and the
end is padded with zeros so that slices are equal. Used-flags and the control block go in the engine's
small message, exact, never compressed.

Nothing happens in the background but the collectives themselves: sums are made when the next bucket
leaves and while the host waits, as in shared memory.

Source: gloo's own reduce-scatter sends as much as its all-reduce; an all-to-all sends half of that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slicing
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.engine.wires.wire import Done, InFlight, Stateless
from lightning_dp.internals.autograd import wide_gloo

# Received slices wait in memory of their own until they are added; what is more than this leaves later.
RECEIVE_BYTES = 64 * 2**20
HALF = (torch.bfloat16, torch.float16)


class Exchange:
    """One bucket under way.

    Attributes:
        grads: ``(K * n,)``, the bucket's gradients; this rank's slice becomes the mean, or all of them.
        gathers: Whether the mean goes to all ranks.
        done: Whether it is there.
        ended: When it was, in seconds of ``time.perf_counter``.
    """

    def __init__(self, wire: ShardWire, bucket: Bucket, *, gathers: bool) -> None:
        bucket.allocate()
        self.grads = bucket.grads  # not the bucket's any more, if that is given up
        self.gathers = gathers
        self.received = self.grads[:0]
        self.work: Any = None
        self.done = False
        self.ended = 0.0
        self._wire = wire

    def wait(self) -> None:
        """Return when the mean is there. Python's signal handlers run meanwhile.

        Collective: completes what every rank has started. Blocks.
        """
        self._wire.complete(self)

    def is_completed(self) -> bool:
        """Whether the mean is there, or will never be; moves on what can be moved. Does not block."""
        self._wire.advance()
        return self.done or self._wire.is_lost


class ShardWire(Stateless):
    """All-to-all, local sum in the order of ranks, all-gather; made by :meth:`connect`.

    Half types are added in fp32 and rounded once.

    Args:
        group: Who takes part; carries first halves.
        gather_group: The same ranks; carries second halves.
        gathers: Whether :meth:`launch` runs both halves; ``False`` leaves each rank with the mean of its
            own slice, and with its local gradients elsewhere.
    """

    carries_control = False

    def __init__(
        self, group: ReplicaGroup, gather_group: dist.ProcessGroup, *, gathers: bool = True
    ) -> None:
        self.group = group
        self.gather_group: dist.ProcessGroup | None = gather_group
        self.gathers = gathers
        self.predivide_factor = 1 / group.world_size
        self.slicing = Slicing(group.world_size)
        self.is_lost = False
        self._queued: deque[Exchange] = deque()
        self._reducing: deque[Exchange] = deque()
        self._gathering: deque[Exchange] = deque()
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    @classmethod
    def connect(
        cls, group: ReplicaGroup, timeout: timedelta | None = None, **options: Any
    ) -> ShardWire:
        """Make the second group, over all ranks of the default group.

        Args:
            group: Who takes part.
            timeout: How long a collective may take; ``None`` is torch's default.
            options: As the constructor's.

        Collective: every rank, once, in the same order as other group creations.
        """
        backend = wide_gloo() if dist.get_backend() == "gloo" else None
        return cls(group, dist.new_group(timeout=timeout, backend=backend), **options)

    # What others call

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place; only this rank's slice of it without ``gathers``.

        Collective: every rank, in launch order. Does not block.
        """
        return self._start(Exchange(self, bucket, gathers=self.gathers))

    def reduce(self, bucket: Bucket) -> InFlight:
        """Start the first half: ``bucket.slice(rank)`` becomes the mean, the rest stays this rank's own.

        Collective: every rank, in launch order. Does not block.
        """
        return self._start(Exchange(self, bucket, gathers=False))

    def gather(self, flat: Tensor) -> InFlight:
        """Start the second half alone: every rank's slice of ``flat`` goes to all, in place.

        Args:
            flat: ``(K * n,)``, contiguous, any dtype; elements ``rank * n`` to ``(rank + 1) * n`` are this
                rank's. Not to be touched before the result was waited for.

        Collective: every rank, same order, ``n`` and dtype, between reductions. Does not block; wait with
        ``interruptible_wait``.
        """
        work: InFlight = _all_gather(flat, self._own(flat), self._open_group())
        return work

    def forget(self) -> None:
        """Let go of memory for slices of buckets that are no more."""
        self._spare.clear()

    def close(self) -> None:
        """End the second group. Local."""
        self._drop()
        group, self.gather_group = self.gather_group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    # How exchanges move on

    def _start(self, exchange: Exchange) -> InFlight:
        group = self._open_group()
        if not self.group.waits_on_host:
            return self._queue_on_device(exchange, group)
        self._queued.append(exchange)
        self.advance()
        return exchange

    @torch.no_grad()
    def _queue_on_device(self, exchange: Exchange, group: dist.ProcessGroup) -> InFlight:
        """NCCL: both halves go into its stream, one after the other, in one group."""
        own, main = self._own(exchange.grads), self.group.process_group
        work: InFlight
        if own.dtype not in HALF:
            work = _reduce_scatter(own, exchange.grads, main)
        else:
            rows = torch.empty_like(exchange.grads)
            dist.all_to_all_single(rows, exchange.grads, group=main, async_op=True).wait()
            add_rows(rows.view(self.group.world_size, -1), own)
            work = Done()
        return _all_gather(exchange.grads, own, main) if exchange.gathers else work

    def advance(self) -> None:
        """Send, add and hand on what can be now. Does not block.

        On an accelerator whose collectives the host does not wait for, everything was queued at launch.
        """
        self._send()
        while self._reducing and self._reducing[0].work.is_completed():
            self._add(self._reducing[0])
        while self._gathering and self._gathering[0].work.is_completed():
            self._end(self._gathering[0])

    def complete(self, exchange: Exchange) -> None:
        """Wait for ``exchange``: first for all sums, so that the wire is never idle for want of one.

        Collective: completes what every rank has started. Blocks.
        """
        while not exchange.done:
            self._open_group()
            self._send()
            if self._reducing:
                interruptible_wait(self._reducing[0].work)
                self._add(self._reducing[0])
            else:
                interruptible_wait(self._gathering[0].work)
                self._end(self._gathering[0])

    def _send(self) -> None:
        """Start first halves, as many as there is memory for; at least one."""
        under_way = sum(each.received.nbytes for each in self._reducing)
        while self._queued:
            exchange = self._queued[0]
            under_way += exchange.grads.nbytes
            if self._reducing and under_way > RECEIVE_BYTES:
                return
            with self._undivided():
                exchange.received = self._take(exchange.grads)
                exchange.work = dist.all_to_all_single(
                    exchange.received,
                    exchange.grads,
                    group=self.group.process_group,
                    async_op=True,
                )
                self._reducing.append(self._queued.popleft())

    @torch.no_grad()
    def _add(self, exchange: Exchange) -> None:
        """Add what was received, in the order of ranks, into this rank's slice; begin the second half."""
        exchange.work.wait()  # is over; raises if it failed
        with self._undivided():
            own = self._own(exchange.grads)
            add_rows(exchange.received.view(self.group.world_size, -1), own)
            self._give_back(exchange)
            if exchange.gathers:
                exchange.work = _all_gather(exchange.grads, own, self._open_group())
                self._gathering.append(exchange)
            else:
                exchange.done, exchange.ended = True, time.perf_counter()
            self._reducing.popleft()

    def _end(self, exchange: Exchange) -> None:
        exchange.work.wait()
        exchange.done, exchange.ended = True, time.perf_counter()
        self._gathering.popleft()

    # Memory

    def _own(self, flat: Tensor) -> Tensor:
        n = flat.numel() // self.group.world_size
        return flat[self.group.rank * n : (self.group.rank + 1) * n]

    def _take(self, like: Tensor) -> Tensor:
        spare = self._spare.get((like.numel(), like.dtype))
        return spare.pop() if spare else torch.empty_like(like)

    def _give_back(self, exchange: Exchange) -> None:
        received, exchange.received = exchange.received, exchange.grads[:0]
        self._spare.setdefault((received.numel(), received.dtype), []).append(received)

    def _open_group(self) -> dist.ProcessGroup:
        if self.gather_group is None or self.is_lost:
            raise RuntimeError("connection closed: this rank was interrupted in the midst of a sum")
        return self.gather_group

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """What is begun inside is ended, or this rank leaves.

        An exception of a signal handler may come between any two lines. Then it is not known any more which
        collectives were started, and one too many would meet another of the other ranks.
        """
        try:
            yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        self.is_lost = True
        for exchanges in (self._queued, self._reducing, self._gathering):
            exchanges.clear()
        self._spare.clear()


def add_rows(rows: Tensor, out: Tensor) -> None:
    """Put the sum of ``rows``, shape ``(K, n)``, into ``out``, shape ``(n,)``, in the order of rows.

    Half types are added in fp32 and rounded once, so that the error does not grow with ``K``.
    """
    if out.dtype in HALF:
        total = rows[0].float()
        for row in rows[1:]:
            total.add_(row)
        out.copy_(total)
        return
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)


def _all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Any:
    # Newer versions of torch warn at the older name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=True)


def _reduce_scatter(own: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(own, flat, group=group, async_op=True)
