"""The control block: what ranks tell each other inside the last bucket of a reduction.

Some numbers behind the gradients and used-flags of one bucket, averaged with them over ranks. They
replace collectives of their own: weights, the request to stop, errors, late gradients, changed buffers.

[Note: signs] Whether all ranks are at the same step is told by averages too: each rank writes the low
bits of its step's number as -1 or 1. Where all agree the mean is -1 or 1; one rank that differs pulls it
towards 0 by ``2 / world_size``, far above rounding.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CONTROL_SIZE = 20
STEP_BITS = 3  # steps that differ by less than 8 are told apart


class Control(enum.IntEnum):
    """Places in the control block. Every value is averaged over ranks; a flag is set if it is above 0."""

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
    FAILED_RANK = 12  # one more than the number of the rank that raised
    STEP = 13  # STEP_BITS places: signs of the step's number
    # For the gradient noise scale, where it was asked for (see ``reduction/norms.py``):
    PARTS = 16  # small batches of this rank that counted
    PART_NORM = 17  # the sum over them of |mean gradient|^2 * weight
    MEAN_NORM = 18  # this rank's slice of |averaged gradient|^2, of the reduction before


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
        parts: Small batches that counted, over all ranks; 0 where norms were not asked for.
        part_norm: The sum over them of ``|mean gradient|^2 * weight``.
        mean_norm_before: ``|averaged gradient|^2`` of the window before this one.
    """

    weight: float
    micro_batches: float
    loss: float
    squared_norm: float
    stop: bool
    straggler_s: float = 0.0
    parts: int = 0
    part_norm: float = 0.0
    mean_norm_before: float = 0.0

    @classmethod
    def from_means(
        cls, means: list[float], world_size: int, reference: float = 1.0
    ) -> WindowTotals:
        """Read a reduced control block, whose values are means over ranks.

        Args:
            means: Its values.
            world_size: Of how many ranks.
            reference: What the weights in it are multiples of.
        """
        weight = means[Control.WEIGHT]
        return cls(
            weight=weight * world_size * reference,
            micro_batches=round(means[Control.MICRO_BATCHES] * world_size),
            loss=means[Control.LOSS] / weight if weight else float("nan"),
            squared_norm=means[Control.SQUARED_NORM],
            stop=means[Control.STOP] > 0,
            straggler_s=max(0.0, means[Control.BACKWARD_S2] - means[Control.BACKWARD_S] ** 2)
            ** 0.5,
            parts=round(means[Control.PARTS] * world_size),
            part_norm=means[Control.PART_NORM] * world_size * reference,
            mean_norm_before=means[Control.MEAN_NORM] * world_size,
        )


_SIGNS = [
    {int(Control.STEP) + bit: 1.0 if step >> bit & 1 else -1.0 for bit in range(STEP_BITS)}
    for step in range(1 << STEP_BITS)
]


def step_signs(step: int) -> dict[int, float]:
    """The places and values that tell ``step`` ([Note: signs])."""
    return _SIGNS[step % len(_SIGNS)]


def steps_differ(means: list[float]) -> bool:
    """Whether ranks wrote other steps into a reduced control block."""
    signs = means[Control.STEP : Control.STEP + STEP_BITS]
    return any(abs(sign) < 1 - 1e-4 for sign in signs)


def write(block: Tensor, values: Mapping[int, float | Tensor], *, read: bool) -> None:
    """Overwrite ``block``, shape ``(CONTROL_SIZE,)``.

    Args:
        block: fp32 or fp64.
        values: By place.
        read: Whether the host may read values that are tensors; otherwise they are copied on their device.
    """
    numbers = [0.0] * CONTROL_SIZE
    on_device = {}
    for place, value in values.items():
        if isinstance(value, Tensor) and not read:
            on_device[place] = value
        else:
            numbers[place] = float(value)
    block.copy_(torch.tensor(numbers, dtype=block.dtype, device="cpu"), non_blocking=True)
    for place, value in on_device.items():
        block[place] = value


def copy_to_host(block: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Queue a copy of ``block`` to the host; return it, and the event after which it may be read."""
    on_cuda = block.device.type == "cuda"
    host = torch.empty(block.shape, dtype=block.dtype, device="cpu", pin_memory=on_cuda)
    host.copy_(block, non_blocking=True)
    if not on_cuda:
        return host, None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event


class Reading:
    """A reduced control block, for its device and for the host.

    On a CPU the host reads it at once. On an accelerator it is copied behind the step's own work and read
    one step later: reading it at once would stop the host in every step. All ranks are one step late
    alike, so what they do about it still pairs up.

    Args:
        block: Shape ``(CONTROL_SIZE,)``, reduced.
        at_once: Whether the host reads it now.

    Attributes:
        block: The same, until :meth:`leave`.
    """

    def __init__(self, block: Tensor, *, at_once: bool) -> None:
        self.block = block
        self._host: Tensor = block
        self._event: torch.cuda.Event | None = None
        self._means: list[float] | None = block.tolist() if at_once else None

    def leave(self, *, read: bool) -> None:
        """Let go of the block's memory, which will be used again.

        Args:
            read: Whether the host reads now what it has not read yet, or copies it to read it later.
        """
        if read:
            self.means()
        elif self._means is None:
            self._host, self._event = copy_to_host(self.block)
        if self._host is self.block:
            del self._host
        del self.block

    def has_error(self) -> bool:
        """Whether a rank reported one. The host reads; asked only where it must know at once."""
        return self.means()[Control.ERROR] > 0

    def means(self) -> list[float]:
        """The values, means over ranks. Waits for a copy, if there is one, not for the device's queue."""
        if self._means is None:
            if self._event is not None:
                self._event.synchronize()
            self._means = self._host.tolist()
        return self._means
