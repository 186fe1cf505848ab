"""Updated parameters from the ranks that updated them to all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.engine.wires.shard import all_gather
from lightning_dp.optim.shares import Shares

IN_FLIGHT = 2  # buckets whose memory is used at a time


class ParameterGather:
    """Makes parameters whole again after each rank has updated its share.

    No parameter's storage is replaced: parts are copied in.

    Args:
        shares: Who updates what.
        group: Who takes part.
    """

    def __init__(self, shares: Shares, group: ReplicaGroup) -> None:
        self._shares = shares
        self._group = group

    @torch.no_grad()
    def run(self, buckets: Sequence[Bucket]) -> None:
        """Bring every rank's part of ``buckets`` to all ranks.

        Collective: every rank, the same buckets in the same order. Blocks (on CUDA: the stream only).
        Sends ``(world_size - 1) / world_size`` of the parameters' bytes, and holds two buckets of
        memory.
        """
        under_way: deque[_BucketGather] = deque()
        with self._group.waiting("updated parameters"):
            for bucket in buckets:
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().finish()
                under_way.append(_BucketGather(bucket, self._shares, self._group))
            while under_way:
                under_way.popleft().finish()


class _BucketGather:
    """One bucket's parameters under way; made when it is sent.

    Slices travel in one all-gather, whole tensors in one broadcast from each owner.
    """

    def __init__(self, bucket: Bucket, shares: Shares, group: ReplicaGroup) -> None:
        self._bucket = bucket
        self._shares = shares
        self._group = group
        self._divided = shares.divided(bucket)
        self._dtype = reduce(
            torch.promote_types, (bucket.slots[n].param.dtype for n in self._divided)
        )
        self._parts: list[Tensor] = []  # by rank
        self._works: list[Any] = []
        if bucket.sliced:
            self._send_slices()
        else:
            self._send_tensors()

    def _send_slices(self) -> None:
        world_size = self._group.world_size
        length = self._bucket.slice_numel
        whole = torch.empty(world_size * length, dtype=self._dtype, device=self._group.device)
        self._parts = [*whole.view(world_size, length)]
        mine = torch.empty_like(self._parts[self._group.rank])
        self._copy(self._group.rank, mine, into_parameters=False)
        group = self._group.process_group
        self._works = [all_gather(whole, mine, group)]

    def _send_tensors(self) -> None:
        for rank in range(self._group.world_size):
            owned = [self._shares.of_rank(self._bucket, n, rank) for n in self._divided]
            numel = sum(_real(share.of(share.slot.param.data)).numel() for share in owned)
            part = torch.empty(numel, dtype=_real_dtype(self._dtype), device=self._group.device)
            self._parts.append(part)
            if not numel:
                continue
            if rank == self._group.rank:
                self._copy(rank, part, into_parameters=False)
            group = self._group.process_group
            self._works.append(dist.broadcast(part, group=group, group_src=rank, async_op=True))

    def finish(self) -> None:
        """Wait, and copy the others' parts into the parameters."""
        for work in self._works:
            interruptible_wait(work, on_host=self._group.waits_on_host)
        for rank, part in enumerate(self._parts):
            if rank != self._group.rank:
                self._copy(rank, part, into_parameters=True)

    def _copy(self, rank: int, part: Tensor, *, into_parameters: bool) -> None:
        """Copy ``rank``'s share of every divided parameter from or to ``part``, one behind the other."""
        place = 0
        for position in self._divided:
            share = self._shares.of_rank(self._bucket, position, rank)
            if share.is_empty:
                continue
            mine = _real(share.of(share.slot.param.detach()))  # counts as a change of the parameter
            theirs = part[place : place + mine.numel()]
            place += mine.numel()
            if into_parameters:
                mine.copy_(theirs)
            else:
                theirs.copy_(mine)


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
