"""The accumulation window: which backward reduces, and what each micro-batch weighs.

The gradient that an optimizer should see is ``sum(w * g) / sum(w)`` over every micro-batch ``g`` of every
rank. Each micro-batch is back-propagated with its weight, ``.grad`` and the buckets carry the sums, and
``sum(w)`` travels in the control block. One division at the end is then right whatever the window's
length, without looking ahead and without a collective of its own.

A trainer that already divided each loss by ``steps`` (Lightning does) says so with ``divisor``; a full
window of equal weights has then the factor 1, exactly, and no division happens at all.

[Note: relative weights] A weight of 70,000 tokens is more than half precision holds, and multiplying with
it rounds everywhere else. What is multiplied with a loss is ``weight / reference``, where the reference
is a number that all ranks agree on: about the mean weight of a micro-batch. It cancels in the division.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dp.engine.control import Control, step_signs, write


class AccumulationWindow:
    """Micro-batches since the last reduction, on this rank.

    Args:
        by_default: Whether a backward outside of :meth:`reducing` reduces.

    Attributes:
        reduces: Whether a backward that runs now ends in a reduction. Read when a gradient arrives,
            never in forward, so whatever entry point ran the forward does not matter.
        ends: Whether that reduction is the window's last. A reduction before the last leaves sums
            undivided.
        weighted: Whether micro-batches weigh (automatic optimization). Without, a reduction is the
            plain mean over ranks.
        weight: Sum of weights so far, as multiples of ``reference``.
        last_weight: The last micro-batch's.
        reference: The same on all ranks ([Note: relative weights]).
        given: Whether weights count something (tokens); without, each rank's micro-batch weighs 1.
        micro_batches: How many there were, of all ranks' if the window was restored.
        position: Which micro-batch of the window runs now, from 0; counted here, never inferred from a
            loader.
        step: Number of the batch that runs; compared between ranks in each reduction.
        stop: Whether this rank asks all ranks to stop after this step.
        is_local: Whether windows are this rank's own: no backward reduces, and each rank steps alone.
    """

    def __init__(self, *, by_default: bool = True) -> None:
        self.reduces = self._here = by_default
        self._closed = 0
        self.ends = True
        self.divisor = 1
        self.reference = 1.0
        self.given = False
        self.stop = False
        self._is_local = False
        self.position = 0
        self.step = 0
        self.reset()

    def reset(self) -> None:
        """Begin an empty window."""
        self.weighted = False
        self.weight: Tensor | float = 0.0
        self.last_weight: Tensor | float = 0.0
        self.micro_batches = 0
        self.loss: Tensor | float = 0.0

    def add(
        self, weight: Tensor | float = 1.0, loss: Tensor | float | None = None, divisor: int = 1
    ) -> None:
        """Count one micro-batch.

        Args:
            weight: What its loss is multiplied with; a tensor of shape ``()`` is not read by the host.
            loss: Its mean loss before weighting; a tensor of shape ``()`` is not read by the host.
            divisor: By what the trainer divides each loss.
        """
        if self.micro_batches and divisor != self.divisor:
            # The window began under another divisor: count its weight in units of this one.
            self.weight = self.weight * (divisor / self.divisor)
        self.weighted = True
        self.divisor = divisor
        self.weight = self.weight + weight
        self.last_weight = weight
        if loss is not None:
            loss = weight * (loss.detach() if isinstance(loss, Tensor) else loss)
            self.loss = self.loss + loss if self.micro_batches else loss
        self.micro_batches += 1

    # Which backward reduces

    @contextmanager
    def reducing(self, here: bool) -> Iterator[None]:
        """While in this context backwards reduce, or do not; ``closed`` goes before."""
        before, self._here = self._here, here
        self._decide()
        try:
            yield
        finally:
            self._here = before
            self._decide()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While in this context no backward reduces; gradients stay in ``.grad``."""
        self._closed += 1
        self._decide()
        try:
            yield
        finally:
            self._closed -= 1
            self._decide()

    @property
    def is_local(self) -> bool:
        """See the class."""
        return self._is_local

    @is_local.setter
    def is_local(self, local: bool) -> None:
        self._is_local = local
        self._decide()

    @property
    def ends_alone(self) -> bool:
        """Whether a backward that runs now ends a window that is this rank's own."""
        return self._is_local and self._here and not self._closed and self.ends

    def _decide(self) -> None:
        self.reduces = self._here and not self._closed and not self._is_local

    # What travels

    def write(
        self, block: Tensor, news: Mapping[int, float | Tensor] | None = None, *, read: bool
    ) -> None:
        """Write this rank's part of the control block.

        Args:
            block: Shape ``(CONTROL_SIZE,)``, fp32 or fp64; overwritten.
            news: What else this rank has to say.
            read: Whether the host may read tensors.
        """
        write(
            block,
            {
                **(news or {}),
                **step_signs(self.step),
                Control.WEIGHT: self.weight if self.weighted else 1.0,
                Control.MICRO_BATCHES: self.micro_batches,
                Control.STOP: self.stop,
                Control.LOSS: self.loss,
            },
            read=read,
        )

    def factor(self, mean_weight: Tensor | float, dtype: torch.dtype) -> Tensor | float:
        """Return what an average over ranks must be multiplied with to be the weighted mean.

        Args:
            mean_weight: The reduced ``WEIGHT``: the ranks' mean of their sums of weights; a tensor of shape
                ``()`` is not read by the host.
            dtype: Of the control block; a factor closer to 1 than its rounding is 1.
        """
        if not self.weighted or not self.ends:
            return 1.0
        resolution = 4 * torch.finfo(dtype).eps
        if isinstance(mean_weight, Tensor):
            factor = self.divisor / mean_weight
            near = (factor - 1.0).abs() <= resolution
            return torch.where((mean_weight > 0) & ~near, factor, 1.0)
        share = self.divisor / mean_weight if mean_weight else 1.0
        return 1.0 if abs(share - 1.0) <= resolution else share

    def own_factor(self) -> Tensor | float:
        """As :meth:`factor`, of a window that no other rank takes part in."""
        weight = self.weight
        return self.factor(weight, weight.dtype if isinstance(weight, Tensor) else torch.float64)
