"""Who takes part: process groups and this rank's place in them, as one frozen value."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.errors import ConfigError
from lightning_dp.internals.autograd import wide_gloo

Waiting = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas that train one model together.

    Attributes:
        process_group: The group that carries gradients; ``None`` only for a world of one without
            ``torch.distributed``.
        rank: This replica's number in the group.
        world_size: How many replicas there are.
        device: Where this replica's parameters live.
        control_group: For what ranks tell each other while gradients are under way: on the CPU, whatever
            the
            device. A message there can never be paired with a bucket.
        host_reads_are_free: Whether the host may read a reduced value without waiting for an accelerator.
            ``False`` on a CPU runs an accelerator's logic there (for tests).
        reduces: Whether there is anything to average.
        waiting: Registers a wait for other ranks with whoever watches over them.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    control_group: dist.ProcessGroup | None = None
    host_reads_are_free: bool = True
    reduces: bool = True
    waiting: Waiting = nullcontext

    @classmethod
    def create(
        cls,
        device: torch.device,
        timeout: timedelta | None = None,
        *,
        host_reads_are_free: bool | None = None,
        alone: bool = False,
        waiting: Waiting = nullcontext,
    ) -> ReplicaGroup:
        """Make groups of its own over all ranks of the default group.

        Groups of its own, so that a user's collectives (SyncBatchNorm, metrics, ``all_gather`` with
        gradients) can never be paired with a bucket, in whatever order they are issued.

        Args:
            device: Where the parameters live; decides the backend (gloo for CPU, NCCL for CUDA).
            timeout: How long a collective may take; ``None`` is torch's default.
            host_reads_are_free: ``None`` decides by device.
            alone: Reduce in a world of one as well (for tests and benchmarks of one device).
            waiting: Registers a wait for other ranks.

        Collective: every rank of the default group, once, in the same order as other group creations.
        """
        free = device.type == "cpu" if host_reads_are_free is None else host_reads_are_free
        if not dist.is_initialized():
            return cls(None, 0, 1, device, None, free, reduces=False)
        world_size = dist.get_world_size()
        if world_size == 1 and not alone:
            return cls(dist.group.WORLD, 0, 1, device, None, free, reduces=False)
        backend = wide_gloo() if dist.get_backend() == "gloo" else None
        group = dist.new_group(timeout=timeout, backend=backend)
        control = dist.new_group(timeout=timeout, backend="gloo")
        return cls(
            group, dist.get_rank(), world_size, device, control, free, reduces=True, waiting=waiting
        )

    @property
    def waits_on_host(self) -> bool:
        """Whether a wait for a collective blocks the host (gloo, also for an accelerator), not a stream."""
        return self.device.type == "cpu" or "nccl" not in dist.get_backend(self.process_group)

    @property
    def apart(self) -> dist.ProcessGroup | None:
        """The group of a small message on ``device`` beside buckets, some of which may not have left.

        A wire that has no memory for all of them sends some later, and how many differs between ranks.
        """
        return self.control_group if self.waits_on_host else self.process_group

    def close(self) -> None:
        """End the groups and let go of them. Local.

        Let go of them now, whoever still holds this object: a gloo group that is left to the garbage
        collector may be collected in a data loading worker that was forked meanwhile, and waits there,
        for ever or until it crashes, for threads that only exist in this process.
        """
        if self.reduces and dist.is_initialized():
            for group in {self.process_group, self.control_group} - {None}:
                dist.destroy_process_group(group)
        object.__setattr__(self, "process_group", None)
        object.__setattr__(self, "control_group", None)

    def all_gather_object(self, value: Any, what: str = "what the ranks compare") -> list[Any]:
        """Return every rank's picklable ``value``, by rank.

        Args:
            value: This rank's.
            what: Names the wait in reports.

        Collective: every rank, same order. Blocks; the wait can be interrupted. For start-up and rare
        agreement.
        """
        if self.world_size == 1:
            return [value]
        if self.control_group is None:
            values: list[Any] = [None] * self.world_size
            dist.all_gather_object(values, value, group=self.process_group)
            return values
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self.waiting(what):
            sizes, padded = self._padded(data)
            parts = self._gather(padded)
        return [
            pickle.loads(part[:size].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def gather_object(self, value: Any, what: str) -> list[Any]:
        """Return on rank 0 every rank's picklable ``value``, by rank; elsewhere nothing.

        Args:
            value: This rank's. Tensors in it come to the CPU.
            what: Names the wait in reports.

        Collective: every rank, same order. Blocks; the wait can be interrupted.
        """
        if self.world_size == 1:
            return [value]
        file = io.BytesIO()
        torch.save(value, file)
        parts: list[Tensor] = []
        with self.waiting(what):
            sizes, padded = self._padded(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
            if self.rank == 0:
                parts = [torch.empty_like(padded) for _ in range(self.world_size)]
            group = self.control_group
            work = dist.gather(padded, parts or None, group=group, group_dst=0, async_op=True)
            interruptible_wait(work)
        return [
            torch.load(io.BytesIO(part[:size].numpy().data), map_location="cpu", weights_only=False)
            for part, size in zip(parts, sizes, strict=False)
        ]

    def _padded(self, data: Tensor) -> tuple[list[int], Tensor]:
        """Return how many bytes each rank has, and ``data`` as long as the longest."""
        mine = torch.tensor([data.numel()], device="cpu")
        sizes = [int(size) for size in self._gather(mine)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        return sizes, padded

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        interruptible_wait(dist.all_gather(parts, tensor, group=self.control_group, async_op=True))
        return parts

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank.

        Collective: every rank, same order. Blocks; the wait can be interrupted.
        """
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def refuse_difference(self, option: str, value: object) -> None:
        """Raise if ranks were given different values of an option.

        Raises:
            ConfigError: Names the values by rank.

        Collective: every rank, same order. Blocks; the wait can be interrupted.
        """
        values = self.all_gather_object(repr(value))
        if len(set(values)) > 1:
            by_rank = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(values))
            raise ConfigError(f"ranks differ in {option}: {by_rank}. Pass the same to all.")

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with rank ``source``'s, in place.

        Args:
            tensor: Any shape and dtype, contiguous, on ``device``.
            source: The rank that keeps its values.

        Collective: every rank, same order, same ``numel``. Blocks (on CUDA: the stream only).
        """
        if self.world_size > 1:
            group = self.process_group
            work = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
            self._wait(work, "values of rank 0")

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Average ``tensor`` over all replicas, in place.

        Args:
            tensor: Any shape, floating dtype, contiguous, on ``device``.

        Collective: every rank, same order, same ``numel``. Blocks (on CUDA: the stream only).
        """
        self.all_reduce(tensor, dist.ReduceOp.AVG, "a mean over ranks")

    def all_reduce(self, tensor: Tensor, op: Any, what: str = "") -> None:
        """Reduce ``tensor`` over all replicas, in place.

        Args:
            tensor: Any shape, a dtype that ``op`` takes, contiguous, on ``device``.
            op: Of ``dist.ReduceOp``.
            what: Names the wait in reports; without, it is not in them.

        Collective: every rank, same order, same ``numel``. Blocks (on CUDA: the stream only).
        """
        if self.world_size > 1:
            work = dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True)
            self._wait(work, what)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's ``tensor``, by rank.

        Args:
            tensor: Any shape and dtype, contiguous, on ``device``; the same on every rank.

        Collective: every rank, same order. Blocks (on CUDA: the stream only).
        """
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._wait(dist.all_gather(parts, tensor, group=self.process_group, async_op=True))
        return parts

    def _wait(self, work: Any, what: str = "") -> None:
        with self.waiting(what) if what else nullcontext():
            interruptible_wait(work, on_host=self.waits_on_host)
