"""Who takes part: a process group and this rank's place in it, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dp.engine.wires.shared_memory import SharedMemory
from lightning_dp.internals.autograd import wide_gloo


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas that train one model together.

    Attributes:
        process_group: The group that carries gradients; ``None`` only for a world of one without
            ``torch.distributed``.
        rank: This replica's number in the group.
        world_size: How many replicas there are.
        device: Where this replica's parameters live.
        shared_memory: How buckets are summed where all ranks share a machine; otherwise ``None``.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    shared_memory: SharedMemory | None = None

    @classmethod
    def create(
        cls, device: torch.device, timeout: timedelta | None = None, *, shared_memory: bool = False
    ) -> ReplicaGroup:
        """Make a group of its own over all ranks of the default group.

        A group of its own, so that a user's collectives (SyncBatchNorm, metrics, ``all_gather`` with
        gradients) can never be paired with a bucket, in whatever order they are issued.

        Args:
            device: Where the parameters live; decides the backend (gloo for CPU, NCCL for CUDA).
            timeout: How long a collective may take; ``None`` is torch's default.
            shared_memory: Sum buckets through shared memory if all ranks are on this machine's CPU.

        Collective: every rank of the default group, once, in the same order as other group creations.
        """
        if not dist.is_initialized():
            return cls(None, 0, 1, device)
        if dist.get_world_size() == 1:
            return cls(dist.group.WORLD, 0, 1, device)
        backend = wide_gloo() if dist.get_backend() == "gloo" else None
        group = dist.new_group(timeout=timeout, backend=backend)
        made = cls(group, dist.get_rank(), dist.get_world_size(), device)
        if not shared_memory or device.type != "cpu":
            return made
        return replace(
            made, shared_memory=SharedMemory.connect(made.rank, made.all_gather_object, timeout)
        )

    def close(self) -> None:
        """End the group and let go of it. Local.

        Let go of it now, whoever still holds this object: a gloo group that is left to the garbage
        collector may be collected in a data loading worker that was forked meanwhile, and waits there,
        for ever or until it crashes, for threads that only exist in this process.
        """
        if self.process_group is not None and self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        if self.shared_memory is not None:
            self.shared_memory.close()
        object.__setattr__(self, "process_group", None)

    @property
    def host_reads_are_free(self) -> bool:
        """Whether reading a reduced value does not make the host wait for an accelerator."""
        return self.device.type == "cpu"

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank.

        Collective: every rank, same order. Blocks. For start-up and rare agreement only.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return rank ``source``'s ``value`` on every rank.

        Collective: every rank, same order. Blocks.
        """
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(
            values, dist.get_global_rank(self._group, source), group=self._group
        )
        return values[0]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with rank ``source``'s, in place.

        Args:
            tensor: Any shape and dtype, contiguous, on ``device``.
            source: The rank that keeps its values.

        Collective: every rank, same order, same ``numel``. Blocks (on CUDA: the stream only).
        """
        if self.world_size > 1:
            dist.broadcast(tensor, dist.get_global_rank(self._group, source), group=self._group)

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        """Average ``tensor`` over all replicas, in place.

        Args:
            tensor: Any shape, floating dtype, contiguous, on ``device``.

        Collective: every rank, same order, same ``numel``. Blocks (on CUDA: the stream only).
        """
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.process_group)

    @property
    def _group(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise ValueError("a world of one has no group to communicate in")
        return self.process_group
