"""Updated parameters from the ranks that updated them to all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.engine.wires.shard import all_gather
from lightning_dp.engine.wires.shared_memory import SharedMemory
from lightning_dp.optim.guard import memory_of
from lightning_dp.optim.shares import Shares

IN_FLIGHT = 2  # buckets whose memory is used at a time


class ParameterGather:
    """Makes parameters whole again after each rank has updated its share.

    No parameter's storage is replaced: parts are copied in.

    Args:
        shares: Who updates what.
        group: Who takes part.
        memory: Where ranks of one machine meet; ``None`` sends parts over the process group.
    """

    def __init__(
        self, shares: Shares, group: ReplicaGroup, memory: SharedMemory | None = None
    ) -> None:
        self.shares = shares
        self.group = group
        self._memory = memory

    @torch.no_grad()
    def run(self, buckets: Sequence[Bucket]) -> None:
        """Bring every rank's part of ``buckets`` to all ranks.

        Collective: every rank, the same buckets in the same order. Blocks (on CUDA: the stream only).
        Sends ``(world_size - 1) / world_size`` of the parameters' bytes, and holds two buckets of
        memory; in shared memory none.
        """
        under_way: deque[BucketGather] = deque()
        with self.group.waiting("updated parameters"):
            if self._memory is not None:
                self._memory.gather(
                    [self._row(buckets, rank) for rank in range(self.group.world_size)]
                ).wait()
                return
            for bucket in buckets:
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().finish()
                under_way.append(BucketGather(bucket, self.shares, self.group))
            while under_way:
                under_way.popleft().finish()

    def finish(self) -> None:
        """Wait for what is still under way: nothing."""

    def give_up(self) -> None:
        """Training ends with an error: wait no more. Local."""

    def close(self) -> None:
        """Let go of what was borrowed. Local."""

    def _row(self, buckets: Sequence[Bucket], rank: int) -> list[Tensor]:
        """What ``rank`` has updated of ``buckets``, where it lies in this rank's memory."""
        shares = (
            self.shares.of_rank(bucket, position, rank)
            for bucket in buckets
            for position in self.shares.divided(bucket)
        )
        return [_real(each.of(each.slot.param.detach())) for each in shares if not each.is_empty]


class BucketGather:
    """One bucket's parameters under way; made when it is sent.

    Slices travel in one all-gather, whole tensors in one broadcast from each owner.

    Args:
        bucket: Whose parameters.
        shares: Who updates what.
        group: Who takes part.
        lane: Another process group of the same ranks to send in.

    Attributes:
        bucket: As given.
        works: The collectives.
    """

    def __init__(
        self,
        bucket: Bucket,
        shares: Shares,
        group: ReplicaGroup,
        lane: dist.ProcessGroup | None = None,
    ) -> None:
        self.bucket = bucket
        self._shares = shares
        self._group = group
        self._lane = lane or group.process_group
        self._divided = shares.divided(bucket)
        self._dtype = reduce(
            torch.promote_types, (bucket.slots[n].param.dtype for n in self._divided)
        )
        self._parts: list[Tensor] = []  # by rank
        self.works: list[Any] = []
        device = group.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if bucket.sliced:
            self._send_slices()
        else:
            self._send_tensors()

    def _send_slices(self) -> None:
        world_size = self._group.world_size
        length = self.bucket.slice_numel
        whole = torch.empty(world_size * length, dtype=self._dtype, device=self._group.device)
        self._parts = [*whole.view(world_size, length)]
        mine = self._parts[self._group.rank]
        self._copy(self._group.rank, mine, into_parameters=False)
        self.works = [all_gather(whole, mine, self._lane)]

    def _send_tensors(self) -> None:
        for rank in range(self._group.world_size):
            owned = [self._shares.of_rank(self.bucket, n, rank) for n in self._divided]
            numel = sum(_real(share.of(share.slot.param.data)).numel() for share in owned)
            part = torch.empty(numel, dtype=self._dtype.to_real(), device=self._group.device)
            self._parts.append(part)
            if not numel:
                continue
            if rank == self._group.rank:
                self._copy(rank, part, into_parameters=False)
            work = dist.broadcast(part, group=self._lane, group_src=rank, async_op=True)
            self.works.append(work)

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum(part.nbytes for part in self._parts)

    @property
    def is_there(self) -> bool:
        """Whether :meth:`finish` would not wait; it may raise."""
        return all(work.is_completed() for work in self.works)

    @property
    def comes(self) -> list[Slot]:
        """Whose parameters other ranks have updated something of."""
        shares = (self._shares.of_rank(self.bucket, n, self._group.rank) for n in self._divided)
        return [share.slot for share in shares if not share.is_whole]

    def finish(self) -> None:
        """Wait, and copy the others' parts into the parameters."""
        with torch.cuda.stream(self._stream):  # whose work reads parameters without asking
            for work in self.works:
                interruptible_wait(work, on_host=self._group.waits_on_host)
            for rank, part in enumerate(self._parts):
                if rank != self._group.rank:
                    self._copy(rank, part, into_parameters=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._group.device).wait_stream(self._stream)

    def _copy(self, rank: int, part: Tensor, *, into_parameters: bool) -> None:
        """Copy ``rank``'s share of every divided parameter from or to ``part``, one behind the other."""
        place = 0
        for position in self._divided:
            share = self._shares.of_rank(self.bucket, position, rank)
            if share.is_empty:
                continue
            mine = _real(
                share.of(memory_of(share.slot.param))
            )  # counts as a change of the parameter
            theirs = part[place : place + mine.numel()]
            place += mine.numel()
            if into_parameters:
                mine.copy_(theirs)
            else:
                theirs.copy_(mine)


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat
