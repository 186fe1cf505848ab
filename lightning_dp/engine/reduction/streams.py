"""Gradients that were made on other streams than the one that sends them.

[Note: streams] Autograd runs a parameter's hook on the stream of its forward, and makes the caller's stream
wait for all of them only when the backward ends. A bucket that leaves earlier is filled on the stream of
the hook that completed it. That stream waits for the others first; and they wait for the copy, because the
memory of a gradient that was copied goes back to the stream that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class GradientStreams:
    """The streams on which one reduction's gradients arrived; usually one.

    Args:
        current: Returns the stream of the work that is queued now.
    """

    def __init__(self, current: Callable[[], Any]) -> None:
        self._current = current
        self._seen: set[Any] = set()

    def arrived(self) -> None:
        """A gradient was made on the current stream."""
        self._seen.add(self._current())

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What is queued inside comes after all gradients so far, and before what other streams do next."""
        here = self._current()
        others = self._seen - {here}
        for other in others:
            here.wait_stream(other)
        yield
        for other in others:
            other.wait_stream(here)


def gradient_streams(device: torch.device) -> GradientStreams | None:
    """Return what a reduction on ``device`` needs; a CPU has no streams."""
    return GradientStreams(torch.cuda.current_stream) if device.type == "cuda" else None
