"""How a bucket travels. One object, chosen in a constructor; no flag in the hot path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup


class InFlight(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Return when the result may be read (on CUDA: by work queued on the current stream)."""


class Wire(Protocol):
    """Averages buckets over replicas.

    Attributes:
        carries_flags: Whether used-flags and control tail are averaged together with the gradients.
            Otherwise the reducer sends them in one small collective of their own.
        share: What a local gradient is multiplied with while it is copied into its bucket: ``1 /
            world_size`` where the wire sums, ``1`` where it averages by itself.
    """

    carries_flags: bool
    share: float

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in the launch order agreed for the session. Does not block.
        """

    def forget(self) -> None:
        """Drop what is kept by bucket: the buckets are others now."""

    def close(self) -> None:
        """Let go of what was borrowed."""


class Stateless:
    """A wire that keeps nothing."""

    share: float = 1.0

    def forget(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Nothing to let go of."""


class AllReduceWire(Stateless):
    """The default: one asynchronous all-reduce of the flat storage.

    Args:
        group: Who takes part. gloo averages in two passes over memory, a sum and a division: there the
            division happens in the copy that fills the bucket, where it is free. It also keeps a sum of
            fp16 gradients from overflowing.
    """

    carries_flags = True

    def __init__(self, group: ReplicaGroup) -> None:
        self.group = group
        self.share = 1 / group.world_size if group.device.type == "cpu" else 1.0

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in launch order. Does not block.
        """
        flat = bucket.allocate()
        op = dist.ReduceOp.AVG if self.share == 1.0 else dist.ReduceOp.SUM
        if op == dist.ReduceOp.AVG and bucket.dtype == torch.float16:
            # A sum of fp16 gradients overflows long before their mean does.
            flat.div_(self.group.world_size)
            op = dist.ReduceOp.SUM
        work: InFlight | None = dist.all_reduce(
            flat, op=op, group=self.group.process_group, async_op=True
        )
        return work if work is not None else Done()


class SharedMemoryWire(Stateless):
    """The default where all ranks are on one machine's CPU.

    Args:
        group: Who takes part; it has met in shared memory.
    """

    carries_flags = True

    def __init__(self, group: ReplicaGroup) -> None:
        assert group.shared_memory is not None
        self.memory = group.shared_memory
        self.share = 1 / group.world_size

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in launch order. Does not block.
        """
        return self.memory.start(bucket.allocate())


def default_wire(group: ReplicaGroup) -> Wire:
    """Return the wire of a user who asked for nothing."""
    return AllReduceWire(group) if group.shared_memory is None else SharedMemoryWire(group)


class Done:
    """A collective that has nothing left to wait for."""

    def wait(self) -> None:
        """Return at once."""


@dataclass
class RecordingWire:
    """A wire that records what passes through it: a test double, also for users' own tests.

    Attributes:
        inner: Where buckets go on; ``None`` lets them arrive unchanged, as if alone in the world.
        launches: For each launch, ``(bucket index, names of its parameters, bytes)``.
    """

    inner: Wire | None = None
    launches: list[tuple[int, tuple[str, ...], int]] = field(default_factory=list)

    @property
    def carries_flags(self) -> bool:
        """As the inner wire; alone, the flags arrive as they were sent."""
        return self.inner.carries_flags if self.inner is not None else True

    @property
    def share(self) -> float:
        """As the inner wire."""
        return self.inner.share if self.inner is not None else 1.0

    def forget(self) -> None:
        """As the inner wire."""
        if self.inner is not None:
            self.inner.forget()

    def close(self) -> None:
        """As the inner wire."""
        if self.inner is not None:
            self.inner.close()

    def launch(self, bucket: Bucket) -> InFlight:
        """Record, then pass on.

        Collective: as the inner wire's.
        """
        self.launches.append((bucket.index, tuple(bucket.names), bucket.nbytes))
        return self.inner.launch(bucket) if self.inner is not None else Done()
