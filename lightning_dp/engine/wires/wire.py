"""How a bucket travels: one object, chosen in a constructor; no flag in the hot path."""

from __future__ import annotations

from typing import Protocol

from lightning_dp.engine.bucket import UNCUT, Bucket, Slicing


class InFlight(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Return when the result may be read (on CUDA: by work queued on the current stream)."""


class Wire:
    """Averages buckets over replicas. What a wire does not say of itself is as below.

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

    carries_control: bool = True
    keyed_by_bucket: bool = False
    predivide_factor: float = 1.0
    slicing: Slicing = UNCUT
    ratio: float = 1.0
    gathers: bool = True

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in the launch order agreed for the reduction. Does not block.
        """
        raise NotImplementedError

    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of the message that ``bucket`` travels as."""
        return bucket.nbytes

    def forget(self) -> None:
        """Drop what is kept by bucket: the buckets are others now."""

    def close(self) -> None:
        """Let go of what was borrowed."""


class Done:
    """A collective that has nothing left to wait for."""

    def wait(self) -> None:
        """Return at once."""
