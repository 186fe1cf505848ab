"""Sum buckets, and bring parts to all, through shared memory, where all ranks run on one machine.

gloo sends every byte through the kernel's network code, also to a neighbour on the same machine. Here a
rank reads its neighbours' gradients where they lie. Linux, CPU, at most ``MOST_RANKS`` ranks, all in one
network namespace; everything else goes over the process group.

[Note: how a sum travels] Every rank owns a ring of slots that the others may read. A bucket is cut into
slices, the same on all ranks. A rank copies a slice into its next slot. When the others have theirs, the
sum is made in the order of ranks, so that it is the same to the byte on all of them: by each rank for
itself where they are two or the slice is small; otherwise each adds a share of the slice, writes the sum
over its own numbers in its slot, and copies the others' shares when they have told that they are there.
That reads ``2 (K - 1) / K`` slices, not ``K - 1``, for one more turn of news. A slot is used again when
everybody has read it. Numbers of half precision are added in fp32 and rounded once. What is brought to all
and not summed goes the same way: a rank copies its part into its slots, and the others' out of theirs.

[Note: no thread] Nothing happens in the background: the ring moves when a bucket leaves and while the host
waits. The backward keeps its core busy, and a thread beside it would only take turns with it. Starting a
sum never blocks: what finds no free slot stays in its bucket until there is one.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires.codec import HALF
from lightning_dp.engine.wires.shm_peers import Peer, meet
from lightning_dp.engine.wires.wire import InFlight, Wire
from lightning_dp.internals.autograd import copy_all

# Measured as far as this: of gloo's time for 16 MiB, 0.72 at 8 ranks and 0.77 at 16.
MOST_RANKS = 16
SLICE_BYTES = 512 * 1024  # small enough for a processor's own cache, large enough for its calls
# Ranks from which they share the work of adding. Measured with 25 MiB on two cores, in processor time: 1.18
# of each adding all at 3 ranks, 1.0 at 4, 0.93 at 5, 0.75 at 8; shorter slices gain nothing.
SHARED_FROM = 5
LEAST_SHARED_BYTES = SLICE_BYTES
SLOTS = 16
RING_BYTES = (SLOTS + 1) * SLICE_BYTES  # the last one is for its owner's intermediate sums
ALIGN = 32  # elements
MOST_VIEWS = 1024  # of slots, that are kept: each length of a slice has its own
POLL_MS = 200  # a trainer outside of the main thread is interrupted between two polls only
DEFAULT_TIMEOUT = timedelta(minutes=30)  # as a process group's


class Sum:
    """One sum, or one gather, under way.

    Attributes:
        done: Whether its result is there.
        ended: When it was done, in seconds of ``time.perf_counter``.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.done = False
        self.ended = 0.0

    def wait(self) -> None:
        """Return when the result is there. Python's signal handlers run meanwhile.

        Raises:
            RuntimeError: A rank that is needed has closed its connection, or the time ran out.

        Collective: completes a sum that was started on every rank. Blocks.
        """
        self._memory.advance()
        if self.done:
            return
        deadline = time.monotonic() + self._memory.timeout_s
        while not self.done:
            self._memory.sleep(deadline)
            self._memory.advance()

    def is_completed(self) -> bool:
        """Whether the result is there, or will never be; moves on what can be moved. Does not block."""
        self._memory.advance()
        return self.done or self._memory.is_lost


@dataclass
class Part:
    """What takes one slot of each rank's ring.

    Attributes:
        flat: A slice of a sum; empty in a gather.
        rows: In a gather the bytes that come from each rank, where they belong in this rank's memory.
        ends: The sum or gather of which it is the last part.
    """

    flat: Tensor
    rows: Sequence[Sequence[Tensor]] = ()
    ends: Sum | None = None


class SharedMemory:
    """Sums flat tensors over ranks that share a machine; made by :meth:`connect`.

    Args:
        rank: This rank.
        ring: ``(ring bytes,)`` uint8, this rank's own.
        peers: The others, by rank.
        timeout: Longest wait for one sum; ``None`` is a process group's default.
    """

    def __init__(
        self, rank: int, ring: Tensor, peers: list[Peer], timeout: timedelta | None = None
    ) -> None:
        self.rank = rank
        self.timeout_s = (timeout or DEFAULT_TIMEOUT).total_seconds()
        self._peers = peers
        self._rings = [peer.memory for peer in peers]
        self._rings.insert(rank, ring)
        # By rank, and scratch memory; by dtype, length and slot.
        self._slots: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        self._cut: dict[tuple[torch.dtype, int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._to_write: deque[Part] = deque()
        self._to_add: deque[Part] = deque()
        self._to_read: deque[Part] = deque()
        self._written = self._added = self._read = self._told_read = 0
        self._wide = torch.empty(2, 0)  # fp32, for sums of half types
        self._poll = select.poll()
        for peer in peers:
            self._poll.register(peer.connection, select.POLLIN)

    @classmethod
    def connect(
        cls, rank: int, gather: Callable[[Any], list[Any]], timeout: timedelta | None = None
    ) -> SharedMemory | None:
        """Meet the other ranks; ``None``, on all of them, where that is not possible.

        Args:
            rank: This rank.
            gather: Returns every rank's value, by rank.
            timeout: Longest wait for one sum; ``None`` is a process group's default.

        Collective: every rank. Blocks.
        """
        met = meet(rank, RING_BYTES, MOST_RANKS, gather)
        return cls(rank, *met, timeout) if met is not None else None

    def close(self) -> None:
        """Close the connections and let go of the memory. Sums under way are lost, and none can start."""
        for peer in self._peers:
            peer.close()
        self._peers, self._rings = [], []
        self._slots.clear()
        self._cut.clear()
        for parts in (self._to_write, self._to_add, self._to_read):
            parts.clear()

    def start(self, flat: Tensor) -> Sum:
        """Start to sum ``flat`` over ranks, in place.

        Args:
            flat: ``(n,)`` floating, contiguous, on the CPU; ``n`` and dtype equal on all ranks.

        Collective: every rank, same order. Does not block.
        """
        flat, most = flat.detach(), SLICE_BYTES // flat.element_size()
        flats = [flat] if flat.numel() <= most else flat.split(most)  # type: ignore[no-untyped-call]
        return self._start([Part(each) for each in flats])

    def gather(self, rows: Sequence[Sequence[Tensor]]) -> Sum:
        """Start to bring every rank's part to all, into the memory of ``rows``.

        Args:
            rows: For each rank what comes from it: flat tensors on the CPU, of the same types and sizes on
                all ranks. This rank's own are read, the others' are written. Not to be touched before the
                result was waited for.

        Collective: every rank, same order. Does not block.
        """
        cut = [_cut(row, SLICE_BYTES) for row in rows]
        nothing = torch.empty(0)
        parts = [Part(nothing, each) for each in zip_longest(*cut, fillvalue=())]
        return self._start(parts or [Part(nothing, [()] * len(rows))])

    def _start(self, parts: list[Part]) -> Sum:
        self._check_open()
        started = parts[-1].ends = Sum(self)
        for queue in (self._to_write, self._to_add, self._to_read):
            queue.extend(parts)
        self.advance()
        return started

    @torch.no_grad()
    def advance(self) -> None:
        """Write and add what can be written and added now, and tell the others. Does not block.

        An exception of a signal handler may come between any two of its lines. Then it is not known any
        more what the others have of this rank, so it leaves them: they get an error, not a wrong sum.
        """
        if not self._to_read:
            return
        try:
            self._advance()
        except BaseException:
            self.close()
            raise

    def _advance(self) -> None:
        for peer in self._peers:
            peer.hear()
        self._write()
        ready = min(self._written, *(peer.written for peer in self._peers))
        shared = [self._add_next() for _ in range(ready - self._added)]
        if any(shared):
            self._tell()  # of all at once: news wake whoever sleeps
        while self._read < ready and not any(self._lacks(peer) for peer in self._peers):
            self._read_next()
        if self._read - self._told_read >= SLOTS // 2:
            self._tell()  # otherwise it is soon enough with the next slice: half a ring is free

    def _write(self) -> None:
        """Copy what there is room for into this rank's ring."""
        before = self._written
        limit = min(peer.read for peer in self._peers) + SLOTS
        while self._to_write and self._written < limit:
            part = self._to_write.popleft()
            if part.rows:
                mine = part.rows[self.rank]
                for place, tensor in zip(
                    self._places(self.rank, self._written, mine), mine, strict=True
                ):
                    place.copy_(tensor)
            else:
                self._of_slot(self._written, part.flat)[self.rank].copy_(part.flat)
            self._written += 1
        if self._written != before:
            self._tell()  # now, so that they can begin

    def _add_next(self) -> bool:
        """Add this rank's share of the next slice; return whether it is one that ranks share."""
        shared = self._is_shared(self._to_add[0])
        part = self._to_add.popleft().flat
        if shared:
            mine = self._shares(part)[self.rank]
            terms, _ = self._shares_of_slot(self._added, part)
            self._add(mine, terms)
            terms[self.rank].copy_(mine)
        self._added += 1
        return shared

    def _read_next(self) -> None:
        """Complete the next slice: add it, or copy the others' shares."""
        part = self._to_read.popleft()
        flat, ends = part.flat, part.ends
        if part.rows:
            for rank, theirs in enumerate(part.rows):
                places = self._places(rank, self._read, theirs) if rank != self.rank else ()
                for place, tensor in zip(places, theirs, strict=False):
                    tensor.copy_(place)
        elif self._is_shared(part):
            shares = self._shares(flat)
            del shares[self.rank]
            _, sums = self._shares_of_slot(self._read, flat)
            copy_all(shares, sums)
        else:
            self._add(flat, self._of_slot(self._read, flat))
        self._read += 1
        if ends is not None:
            ends.done, ends.ended = True, time.perf_counter()

    def sleep(self, deadline: float) -> None:
        """Wait for news, a short while at most.

        Args:
            deadline: Seconds of ``time.monotonic``.

        Raises:
            RuntimeError: A rank that is needed has closed its connection, or ``deadline`` has passed.
        """
        self._check_open()
        needed = [peer for peer in self._peers if self._needs(peer)]
        for peer in needed:
            if peer.gone:
                raise RuntimeError(f"connection closed by rank {peer.rank}, which ended or gave up")
        if time.monotonic() > deadline:
            ranks = ", ".join(str(peer.rank) for peer in needed)
            raise RuntimeError(
                f"operation timed out: waited {self.timeout_s:.0f} s for gradients of rank {ranks}"
            )
        for peer in self._peers:
            if peer.gone:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(peer.connection)
        self._poll.poll(POLL_MS)

    @property
    def is_lost(self) -> bool:
        """Whether a rank has gone without which no sum can end, or this one has left."""
        lost = (peer.gone and self._needs(peer) for peer in self._peers)
        return not self._peers or (bool(self._to_read) and any(lost))

    def _check_open(self) -> None:
        if not self._peers:
            raise RuntimeError("connection closed: this rank was interrupted in the midst of a sum")

    def _needs(self, peer: Peer) -> bool:
        full = bool(self._to_write) and peer.read + SLOTS <= self._written
        return full or peer.written <= self._read or self._lacks(peer)

    def _lacks(self, peer: Peer) -> bool:
        """Whether the next slice cannot be completed yet for want of ``peer``'s part in it."""
        there = peer.added if self._is_shared(self._to_read[0]) else peer.written
        return there <= self._read

    def _tell(self) -> None:
        self._told_read = self._read
        for peer in self._peers:
            peer.tell(self._written, self._added, self._read)

    def _is_shared(self, part: Part) -> bool:
        """Whether each rank adds a share of ``part``; the same on all ranks."""
        return len(self._rings) >= SHARED_FROM and part.flat.nbytes >= LEAST_SHARED_BYTES

    def _places(self, rank: int, number: int, row: Sequence[Tensor]) -> list[Tensor]:
        """Where in ``rank``'s slot of slice ``number`` the bytes of ``row`` lie."""
        first = number % SLOTS * SLICE_BYTES
        sizes = [each.numel() for each in row]
        slot = self._rings[rank][first : first + sum(sizes)]
        return list(slot.split(sizes))  # type: ignore[no-untyped-call]

    def _shares(self, part: Tensor) -> list[Tensor]:
        """``part``, cut into what each rank adds: whole vectors of the processor."""
        each = -(-part.numel() // len(self._rings) // ALIGN) * ALIGN
        return list(part.split(each))  # type: ignore[no-untyped-call]

    def _shares_of_slot(self, number: int, part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's share in all slots of slice ``number`` and in scratch memory; the others' sums."""
        key = part.dtype, part.numel(), number % SLOTS
        known = self._cut.get(key)
        if known is None:
            *rings, scratch = [self._shares(slot) for slot in self._of_slot(number, part)]
            terms = [ring[self.rank] for ring in (*rings, scratch)]
            theirs = [ring[rank] for rank, ring in enumerate(rings) if rank != self.rank]
            known = self._cut[key] = terms, theirs
        return known

    def _of_slot(self, number: int, part: Tensor) -> list[Tensor]:
        """Return all ranks' slots of slice ``number``, and scratch memory, as long as ``part``."""
        n = part.numel()
        key = part.dtype, n, number % SLOTS
        known = self._slots.get(key)
        if known is None:
            size = SLICE_BYTES // part.element_size()
            rings = [ring.view(part.dtype) for ring in self._rings]
            known = [ring[key[2] * size :][:n] for ring in rings]
            known.append(rings[self.rank][SLOTS * size :][:n])
            if len(self._slots) >= MOST_VIEWS:
                self._slots.clear()
            self._slots[key] = known
        return known

    def _add(self, part: Tensor, slots: list[Tensor]) -> None:
        """Put the sum over ranks into ``part``, which holds this rank's own."""
        *terms, scratch = slots
        terms[self.rank] = part
        if len(terms) > 2 and part.dtype in HALF:
            self._add_wide(part, terms)
            return
        total = part if self.rank <= 1 else scratch
        torch.add(terms[0], terms[1], out=total)
        for rank in range(2, len(terms)):
            out = part if rank >= self.rank else scratch
            torch.add(total, terms[rank], out=out)
            total = out

    def _add_wide(self, part: Tensor, terms: list[Tensor]) -> None:
        """Add numbers of half precision in fp32; of two, the sum is rounded once anyway."""
        n = part.numel()
        if self._wide.shape[1] < n:
            self._wide = torch.empty(2, n)
        total, wide = self._wide[:, :n]
        total.copy_(terms[0])
        for term in terms[1:]:
            total.add_(wide.copy_(term))  # two steps are faster than an addition of two types
        part.copy_(total)


def _cut(row: Sequence[Tensor], nbytes: int) -> list[list[Tensor]]:
    """The bytes of ``row``'s tensors, ``nbytes`` a list."""
    parts: list[list[Tensor]] = []
    room = 0
    for tensor in row:
        rest = tensor.view(torch.uint8)
        while rest.numel():
            if not room:
                parts.append([])
                room = nbytes
            parts[-1].append(rest[:room])
            rest, room = rest[room:], max(0, room - rest.numel())
    return parts


class SharedMemoryWire(Wire):
    """The default where all ranks are on one machine's CPU; made by :meth:`connect`.

    Args:
        memory: Where the ranks have met.
        world_size: How many there are.
    """

    def __init__(self, memory: SharedMemory, world_size: int) -> None:
        self.memory = memory
        self.predivide_factor = 1 / world_size

    @classmethod
    def connect(
        cls, group: ReplicaGroup, timeout: timedelta | None = None
    ) -> SharedMemoryWire | None:
        """Meet the other ranks; ``None``, on all of them, where they do not share a machine's CPU.

        Collective: every rank. Blocks.
        """
        if group.world_size == 1 or group.device.type != "cpu":
            return None
        memory = SharedMemory.connect(group.rank, group.all_gather_object, timeout)
        return cls(memory, group.world_size) if memory is not None else None

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in launch order. Does not block.
        """
        return self.memory.start(bucket.allocate())

    def close(self) -> None:
        """Close the connections. Local."""
        self.memory.close()
