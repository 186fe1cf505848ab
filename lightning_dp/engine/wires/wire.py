"""How a bucket travels: one object, chosen in a constructor; no flag in the hot path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from lightning_dp.engine.bucket import UNCUT, Bucket, Slicing


class InFlight(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Return when the result may be read (on CUDA: by work queued on the current stream)."""


class Wire(Protocol):
    """Averages buckets over replicas.

    Attributes:
        carries_control: Whether used-flags and control block are averaged together with the gradients.
            Otherwise the engine sends them in one small collective of their own.
        keyed_by_bucket: Whether something is kept by a bucket's number, so that buckets must not be cut
            anew.
        predivide_factor: What a local gradient is multiplied with while it is copied into its bucket: ``1 /
            world_size`` where the wire sums, ``1`` where it averages by itself.
        slicing: How it needs the memory of buckets to be cut.
        ratio: Bytes that it sends for gradients of fp32, as a multiple of theirs.
        gathers: Whether every rank gets all means. Otherwise, of a ``sliced`` bucket, each gets those of
            its own slice, and the rest of the bucket means nothing.
    """

    carries_control: bool
    keyed_by_bucket: bool
    predivide_factor: float
    slicing: Slicing
    ratio: float
    gathers: bool

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in the launch order agreed for the reduction. Does not block.
        """

    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of the message that ``bucket`` travels as."""

    def forget(self) -> None:
        """Drop what is kept by bucket: the buckets are others now."""

    def close(self) -> None:
        """Let go of what was borrowed."""


class Stateless:
    """A wire that keeps nothing."""

    carries_control: bool = True
    keyed_by_bucket: bool = False
    predivide_factor: float = 1.0
    slicing: Slicing = UNCUT
    ratio: float = 1.0
    gathers: bool = True

    def nbytes(self, bucket: Bucket) -> int:
        """As it is."""
        return bucket.nbytes

    def forget(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Nothing to let go of."""


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

    inner: Wire = field(default_factory=lambda: Alone())
    launches: list[tuple[int, tuple[str, ...], int]] = field(default_factory=list)

    @property
    def carries_control(self) -> bool:
        """As the inner wire; alone, everything arrives as it was sent."""
        return self.inner.carries_control

    @property
    def keyed_by_bucket(self) -> bool:
        """As the inner wire."""
        return self.inner.keyed_by_bucket

    @property
    def predivide_factor(self) -> float:
        """As the inner wire."""
        return self.inner.predivide_factor

    @property
    def slicing(self) -> Slicing:
        """As the inner wire."""
        return self.inner.slicing

    @property
    def ratio(self) -> float:
        """As the inner wire."""
        return self.inner.ratio

    @property
    def gathers(self) -> bool:
        """As the inner wire."""
        return self.inner.gathers

    def nbytes(self, bucket: Bucket) -> int:
        """As the inner wire."""
        return self.inner.nbytes(bucket)

    def forget(self) -> None:
        """As the inner wire."""
        self.inner.forget()

    def close(self) -> None:
        """As the inner wire."""
        self.inner.close()

    def launch(self, bucket: Bucket) -> InFlight:
        """Record, then pass on.

        Collective: as the inner wire's.
        """
        self.launches.append((bucket.index, tuple(bucket.names), bucket.nbytes))
        return self.inner.launch(bucket)


class Alone(Stateless):
    """A wire on which everything arrives as it was sent."""

    def launch(self, bucket: Bucket) -> InFlight:
        """Do nothing. Collective: none."""
        bucket.allocate()
        return Done()
