"""Sum a bucket in equal slices, one a rank: an all-reduce in two halves that can be used apart.

[Note: two halves] The first one sends slice ``k`` of every rank to rank ``k`` (all-to-all), which adds
them in the order of ranks; the second one sends the sums to everybody (all-gather). Together they send
what an all-reduce sends, ``2 (K - 1) / K`` of the bucket, and every rank ends with the same bytes, because
each number was added up once. A sharded optimizer uses the first half for gradients and the second one
for parameters.

[Note: two groups] When a sum is ready differs between ranks, so the second halves would mix with the
first ones in another order on each rank. They have a process group of their own: within each, the order
is that of launches on every rank.

[Note: what travels apart] Only gradients are cut, at ``Bucket.slice_numel``: slots begin at 64 bytes, and
the end is padded with zeros so that slices are equal. Used-flags and the control block go in the engine's
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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slicing
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.engine.wires.codec import HALF, Codec, add_others, add_rows, encode_others
from lightning_dp.engine.wires.wire import InFlight, Wire
from lightning_dp.internals.autograd import wide_gloo

# Received slices wait in memory of their own until they are added; what is more than this leaves later.
RECEIVE_BYTES = 64 * 2**20


class Exchange:
    """One bucket under way.

    Attributes:
        grads: ``(K * n,)``, the bucket's gradients; this rank's slice becomes the mean, or all of them.
        codec: How slices are written in messages; ``None`` for numbers as they are.
        gathers: Whether the mean goes to all ranks.
        sent: The message, ``(K, m)``; ``received`` is that of all ranks to this one.
        done: Whether the mean is there.
        ended: When it was, in seconds of ``time.perf_counter``.
    """

    def __init__(self, wire: ShardWire, bucket: Bucket, *, gathers: bool) -> None:
        bucket.allocate()
        self.grads = bucket.grads  # not the bucket's any more, if that is given up
        self.codec = wire.codec_of(bucket)
        if self.codec is not None and self.codec.block > 1:
            bucket.clear_gaps()  # a NaN there would spoil its block
        self.gathers = gathers
        self.sent = self.received = bucket.grads[:0]
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


@dataclass
class Queued:
    """On a device: everything is in the queue of a stream.

    Attributes:
        event: Recorded behind it.
    """

    event: Any

    def wait(self) -> None:
        """Make the current stream wait for it. Does not block the host."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return bool(self.event.query())


class ShardWire(Wire):
    """All-to-all, local sum in the order of ranks, all-gather; made by :meth:`connect`.

    Half types and codes are added in fp32 and rounded once.

    Args:
        group: Who takes part; carries first halves.
        gather_group: The same ranks; carries second halves.
        codec: How gradients are written in messages; ``None`` sends them as they are. Buckets of float64
            and of half precision always go as they are.
        min_bytes: So do buckets that are smaller.
        gathers: Whether :meth:`launch` runs both halves for ``sliced`` buckets too; ``False`` leaves each
            rank with the mean of its own slice of them, and with its local gradients elsewhere.
    """

    carries_control = False

    def __init__(
        self,
        group: ReplicaGroup,
        gather_group: dist.ProcessGroup | None,
        *,
        codec: Codec | None = None,
        min_bytes: int = 0,
        gathers: bool = True,
    ) -> None:
        self.group = group
        self.gather_group = gather_group
        self.codec = codec
        self.min_bytes = min_bytes
        self.gathers = gathers
        self.is_lost = False
        self.predivide_factor = 1 / group.world_size
        self.slicing = Slicing(group.world_size, codec.block if codec is not None else 1)
        self.ratio = codec.ratio if codec is not None else 1.0
        self._stream: Any = None if group.waits_on_host else torch.cuda.Stream(group.device)  # type: ignore[no-untyped-call]
        self._queued: deque[Exchange] = deque()
        self._reducing: deque[Exchange] = deque()
        self._gathering: deque[Exchange] = deque()
        self._spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    @classmethod
    def connect(
        cls, group: ReplicaGroup, timeout: timedelta | None = None, **options: Any
    ) -> ShardWire:
        """Make the second group, over all ranks of the default group; NCCL needs none.

        Args:
            group: Who takes part.
            timeout: How long a collective may take; ``None`` is torch's default.
            options: As the constructor's.

        Collective: every rank, once, in the same order as other group creations.
        """
        if not group.waits_on_host:
            return cls(group, group.process_group, **options)
        backend = wide_gloo() if dist.get_backend() == "gloo" else None
        return cls(group, dist.new_group(timeout=timeout, backend=backend), **options)

    def codec_of(self, bucket: Bucket) -> Codec | None:
        """How ``bucket`` is written; the same on all ranks."""
        large = bucket.slots_numel * bucket.dtype.itemsize >= self.min_bytes
        return self.codec if large and bucket.dtype == torch.float32 else None

    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of ``bucket``'s gradients as they are written."""
        plain = bucket.grad_numel * bucket.dtype.itemsize
        codec = self.codec_of(bucket)
        return plain if codec is None else round(plain * codec.ratio)

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place; perhaps only this rank's slice of it (``gathers``).

        Collective: every rank, in launch order. Does not block.
        """
        self._check_open()
        exchange = Exchange(self, bucket, gathers=self.gathers or not bucket.sliced)
        if self._stream is not None:
            return self._queue_on(self._stream, exchange)
        self._queued.append(exchange)
        self.advance()
        return exchange

    def forget(self) -> None:
        """Let go of memory for slices of buckets that are no more."""
        self._spare.clear()

    def close(self) -> None:
        """End the second group. Local."""
        self._drop()
        group, self.gather_group = self.gather_group, None
        if group not in (None, self.group.process_group) and dist.is_initialized():
            dist.destroy_process_group(group)

    # How exchanges move on

    @torch.no_grad()
    def advance(self) -> None:
        """Send, add and hand on what can be now. Does not block."""
        self._send()
        while self._reducing and self._reducing[0].work.is_completed():
            self._add_first()
        while self._gathering and self._gathering[0].work.is_completed():
            self._end_first()

    @torch.no_grad()
    def complete(self, exchange: Exchange) -> None:
        """Wait for ``exchange``: first for all sums, so that the wire is never idle for want of one.

        Collective: completes what every rank has started. Blocks.
        """
        while not exchange.done:
            self._check_open()
            self._send()
            if self._reducing:
                interruptible_wait(self._reducing[0].work)
                self._add_first()
            else:
                interruptible_wait(self._gathering[0].work)
                self._end_first()

    def _send(self) -> None:
        """Start first halves, as many as there is memory for; at least one."""
        under_way = sum(each.received.nbytes for each in self._reducing)
        while self._queued:
            first = self._queued[0]
            under_way += first.grads.nbytes
            if self._reducing and under_way > RECEIVE_BYTES:
                return
            with self._undivided():
                self._exchange(first)
                self._reducing.append(self._queued.popleft())

    def _add_first(self) -> None:
        first = self._reducing[0]
        first.work.wait()  # is over; raises if it failed
        with self._undivided():
            self._add(first)
            self._reducing.popleft()
            if first.gathers:
                self._gathering.append(first)
            else:
                first.done, first.ended = True, time.perf_counter()

    def _end_first(self) -> None:
        first = self._gathering[0]
        first.work.wait()
        with self._undivided():
            self._decode(first)
            self._gathering.popleft()
            first.done, first.ended = True, time.perf_counter()

    @torch.no_grad()
    def _queue_on(self, stream: Any, exchange: Exchange) -> InFlight:
        """NCCL: everything in one stream beside the backward's, in the same order on every rank."""
        stream.wait_stream(torch.cuda.current_stream())
        exchange.grads.record_stream(stream)
        with torch.cuda.stream(stream):
            if exchange.codec is None and exchange.grads.dtype not in HALF:
                own = self._own(exchange.grads)
                _reduce_scatter(own, exchange.grads, self.group.process_group).wait()
                if exchange.gathers:
                    all_gather(exchange.grads, own, self.gather_group).wait()
            else:
                self._exchange(exchange)
                exchange.work.wait()
                self._add(exchange)
                exchange.work.wait()
                self._decode(exchange)
            return Queued(stream.record_event())

    # Its steps

    def _exchange(self, exchange: Exchange) -> None:
        """Start to send every rank its slice."""
        codec, count = exchange.codec, self.group.world_size
        rows = exchange.grads.view(count, -1)
        if codec is None:
            exchange.sent, exchange.received = rows, self._take(rows)
        else:
            like = codec.message(count, rows.shape[1])
            exchange.sent, exchange.received = self._take(like), self._take(like)
            encode_others(codec, rows, exchange.sent, self.group.rank)
        exchange.work = dist.all_to_all_single(
            exchange.received, exchange.sent, group=self.group.process_group, async_op=True
        )

    def _add(self, exchange: Exchange) -> None:
        """Add what was received, in the order of ranks; begin the second half."""
        own, sent, codec = self._own(exchange.grads), exchange.sent, exchange.codec
        mine = sent[self.group.rank]
        if codec is None:
            add_rows(exchange.received, own)
        else:
            add_others(codec, exchange.received, own, self.group.rank)
        self._give_back(exchange.received)
        if exchange.gathers and codec is not None:
            codec.encode(own.unsqueeze(0), mine.unsqueeze(0))
        if exchange.gathers:
            exchange.work = all_gather(sent.view(-1), mine, self.gather_group)
        elif codec is not None:
            self._give_back(sent)

    def _decode(self, exchange: Exchange) -> None:
        """Read what was gathered, this rank's own too: the same numbers on every rank."""
        if exchange.codec is None or not exchange.gathers:
            return
        rows = exchange.grads.view(self.group.world_size, -1)
        exchange.codec.decode(exchange.sent, rows)
        self._give_back(exchange.sent)

    # Memory

    def _own(self, flat: Tensor) -> Tensor:
        n = flat.numel() // self.group.world_size
        return flat[self.group.rank * n : (self.group.rank + 1) * n]

    def _take(self, like: Tensor) -> Tensor:
        spare = self._spare.get((like.shape, like.dtype))
        return spare.pop() if spare else torch.empty_like(like, device=self.group.device)

    def _give_back(self, message: Tensor) -> None:
        self._spare.setdefault((message.shape, message.dtype), []).append(message)

    def _check_open(self) -> None:
        if self.is_lost:
            raise RuntimeError("connection closed: this rank was interrupted in the midst of a sum")

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


def all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Start to bring every rank's ``own`` to all, into ``out``. Collective: every rank. Does not block."""
    # Newer versions of torch warn at the older name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=True)


def _reduce_scatter(own: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(own, flat, group=group, async_op=True)
