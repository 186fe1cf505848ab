"""The accumulation window: which backward reduces, what each micro-batch weighs, the control tail.

The gradient that an optimizer should see is ``sum(w * g) / sum(w)`` over every micro-batch ``g`` of
every rank. Each micro-batch is back-propagated with its weight, ``.grad`` and the buckets carry the
sums, and ``sum(w)`` travels with the last bucket. One division at the end is then right whatever the
window's length, without looking ahead and without a collective of its own.

A trainer that already divided each loss by ``steps`` (Lightning does) says so with ``divisor``; a full
window of unit weights has then the factor 1, exactly, and no division happens at all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

CONTROL_SIZE = 16


class Control(enum.IntEnum):
    """Places in the control tail. Every value is averaged over ranks; a flag is set if it is above 0."""

    WEIGHT = 0  # sum of this rank's weights in the window
    MICRO_BATCHES = 1  # how many micro-batches this rank ran
    LOSS = 2  # sum of weight * loss
    SQUARED_NORM = 3  # of this rank's own gradients, where it was asked for
    NON_FINITE = 4  # this rank's gradients hold inf or NaN
    STOP = 5  # this rank was asked to stop
    LATE = 6  # a gradient came after its bucket had left
    NEW = 7  # a trainable parameter has no bucket yet
    ERROR = 8  # this rank's backward raised
    BUFFERS = 9  # a buffer that must be equal on all ranks has changed
    BACKWARD_S = 10  # seconds this rank's backward took
    BACKWARD_S2 = 11  # its square: with the mean of both, the spread over ranks


@dataclass(frozen=True)
class WindowTotals:
    """What all ranks did in one window.

    Attributes:
        weight: Sum of weights over ranks and micro-batches.
        micro_batches: Micro-batches over all ranks.
        loss: Weighted mean loss over ranks and micro-batches; NaN if none was given.
        squared_norm: Mean over ranks of the squared norm of local gradients; 0 where not asked for.
        stop: Whether any rank asked to stop.
        straggler_s: Standard deviation over ranks of the backward's seconds.
    """

    weight: float
    micro_batches: float
    loss: float
    squared_norm: float
    stop: bool
    straggler_s: float = 0.0

    @classmethod
    def from_means(cls, means: list[float], world_size: int) -> WindowTotals:
        """Read a reduced control tail, whose values are means over ranks."""
        weight = means[Control.WEIGHT]
        return cls(
            weight=weight * world_size,
            micro_batches=round(means[Control.MICRO_BATCHES] * world_size),
            loss=means[Control.LOSS] / weight if weight else float("nan"),
            squared_norm=means[Control.SQUARED_NORM],
            stop=means[Control.STOP] > 0,
            straggler_s=max(0.0, means[Control.BACKWARD_S2] - means[Control.BACKWARD_S] ** 2)
            ** 0.5,
        )


class AccumulationWindow:
    """Micro-batches since the last reduction, on this rank.

    Attributes:
        reduces: Whether a backward that runs now ends in a reduction. Read when a gradient arrives,
            never in forward, so whatever entry point ran the forward does not matter.
        ends: Whether that reduction is the window's last. A reduction before the last leaves sums
            undivided.
        weighted: Whether micro-batches weigh (automatic optimization). Without, a reduction is the
            plain mean over ranks.
        weight: Sum of weights so far.
        micro_batches: How many there were, of all ranks' if the window was restored.
        position: Which micro-batch of the window runs now, from 0; counted here, never inferred from a
            loader.
        stop: Whether this rank asks all ranks to stop after this step.
    """

    def __init__(self) -> None:
        self.reduces = True
        self.ends = True
        self.divisor = 1
        self.stop = False
        self.position = 0
        self.reset()

    def reset(self) -> None:
        """Begin an empty window."""
        self.weighted = False
        self.weight = 0.0
        self.micro_batches = 0
        self.loss: Tensor | float = 0.0

    def add(self, weight: float = 1.0, loss: Tensor | None = None, divisor: int = 1) -> None:
        """Count one micro-batch.

        Args:
            weight: What its loss is multiplied with, in units of choice (samples, tokens).
            loss: Its mean loss before weighting, shape ``()``; kept without synchronising the host.
            divisor: By what the trainer divides each loss.
        """
        if self.weight and divisor != self.divisor:
            # The window began under another divisor: count its weight in units of this one.
            self.weight *= divisor / self.divisor
        self.weighted = True
        self.divisor = divisor
        self.weight += weight
        self.micro_batches += 1
        if loss is not None:
            value = loss.detach()
            self.loss = self.loss + weight * (float(value) if value.device.type == "cpu" else value)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While in this context no backward reduces; gradients stay in ``.grad``."""
        before = self.reduces
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = before

    def write(self, tail: Tensor, news: Mapping[Control, float] | None = None) -> None:
        """Write this rank's part of the control tail.

        Args:
            tail: Shape ``(CONTROL_SIZE,)``, fp32 or fp64; overwritten.
            news: What else this rank has to say.
        """
        values = [0.0] * CONTROL_SIZE
        for place, value in (news or {}).items():
            values[place] = float(value)
        values[Control.WEIGHT] = self.weight if self.weighted else 1.0
        values[Control.MICRO_BATCHES] = self.micro_batches
        values[Control.STOP] = float(self.stop)
        on_device = isinstance(self.loss, Tensor)
        if not on_device:
            values[Control.LOSS] = float(self.loss)
        tail.copy_(torch.tensor(values, dtype=tail.dtype), non_blocking=True)
        if on_device:
            tail[Control.LOSS] = self.loss

    def factor(self, mean_weight: float, resolution: float) -> float:
        """Return what an average over ranks must be multiplied with to be the weighted mean.

        Args:
            mean_weight: The reduced tail's ``WEIGHT``: the ranks' mean of their sums of weights.
            resolution: Machine epsilon of the tail; a factor closer to 1 than its rounding is 1.
        """
        if not self.weighted or mean_weight == 0:
            return 1.0
        factor = self.divisor / mean_weight
        return 1.0 if abs(factor - 1.0) <= 4 * resolution else factor
