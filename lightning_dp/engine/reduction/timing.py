"""When things happened in one reduction: a few clock reads a bucket, nothing that waits for a device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

now = time.perf_counter


@dataclass
class BucketTimes:
    """One bucket's life, in seconds of ``time.perf_counter``.

    Attributes:
        index: Its number.
        nbytes: Bytes on the wire.
        ready: When its last gradient arrived.
        launched: When its collective was started.
        done: When its collective was known to be done: exact where ``ReductionTimes.exact``, otherwise
            when the host had waited for it.
    """

    index: int
    nbytes: int
    ready: float
    launched: float
    done: float = 0.0


@dataclass
class ReductionTimes:
    """One reducing backward.

    Attributes:
        begin: When it began.
        backward_end: When all gradients had been computed.
        end: When the averaged gradients were there.
        exposed_s: Seconds that the host waited for collectives after the backward had ended; on an
            accelerator filled in by ``settle``.
        buckets: In launch order.
        exact: Whether ``done`` was taken when each collective ended, by a callback.
    """

    begin: float = field(default_factory=now)
    backward_end: float = 0.0
    end: float = 0.0
    exposed_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
    exact: bool = False
    _events: tuple[Any, Any] | None = None

    def launched(self, index: int, nbytes: int, ready: float, launched: float, work: Any) -> None:
        """Note a launch; watch for its end if ``exact``."""
        times = BucketTimes(index, nbytes, ready or launched, launched)
        self.buckets.append(times)
        future = getattr(work, "get_future", None)
        if self.exact and future is not None:
            # Runs on the backend's thread: a perturbation, so only for timelines.
            future().add_done_callback(lambda _: setattr(times, "done", now()))

    def waits(self, device: torch.device) -> None:
        """The host is about to wait for collectives."""
        self.backward_end = now()
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            self._events = (start, stop)

    def waited(self, position: int, work: Any) -> None:
        """The wait for the bucket launched as number ``position`` is over."""
        if not self.buckets[position].done:
            self.buckets[position].done = getattr(work, "ended", 0.0) or now()

    def ends(self) -> None:
        """Every collective is done."""
        self.end = now()
        self.exposed_s += self.end - self.backward_end
        if self._events is not None:
            self._events[1].record()

    def settle(self) -> None:
        """On an accelerator, replace the host's wait by the stream's. Waits for that step's work."""
        if self._events is not None:
            start, stop = self._events
            stop.synchronize()
            self.exposed_s = start.elapsed_time(stop) / 1e3
            self._events = None
