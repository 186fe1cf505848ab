"""Squared norms behind the gradient noise scale: of small batches, and of the average that is stepped on.

A small batch is what a rank did in a window; of one rank alone, a micro-batch. With the mean gradients
``g_p`` of parts that weigh ``w_p``, ``W`` in all, and their weighted mean ``g``, the control block carries
``sum w_p |g_p|^2`` and ``|g|^2``. Of the latter each rank works out one slice, which travels with the next
reduction: there is no collective and no wait for it, and one pass over ``1 / ranks`` of the gradients.

Local norms are taken from the bucket when it has been filled, so before any clipping, and without the
scale of a gradient scaler.

Source: McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.control import Control
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.internals.autograd import not_traced


def squared_norm(values: Tensor) -> Tensor:
    """``|values|^2``, shape ``()``, fp32 or wider; complex and sparse ones too."""
    values = values.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dim() == 1 and values.dtype in (torch.float32, torch.float64):
        return torch.dot(values, values)  # three quarters of a norm's time
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.square()


class GradientNorms:
    """Norms of one window after the other, on their device; the host reads none of them here.

    Args:
        group: Who takes part.
        factor: What gradients in buckets were multiplied with.
        every: Norms are taken of one window in so many.

    Attributes:
        loss_scale: By what a gradient scaler has multiplied the loss; shape ``()``.
    """

    def __init__(self, group: ReplicaGroup, factor: float, every: int = 1) -> None:
        self.loss_scale: Tensor | float = 1.0
        self._rank, self._size = group.rank, group.world_size
        self._factor = factor
        self._every = every
        self._windows = 0
        self._takes = False  # norms of this window
        self._is_open = False  # a backward of this rank's own loss is running
        self._local: list[Tensor] = []  # squared norms of the part that has begun
        self._parts: list[tuple[Tensor | float, Tensor | float]] = []  # 1 if it counts; w |g|^2
        self._mean: list[Tensor] = []  # of this rank's slice of the average
        self._handles: list[Any] = []

    def watch(self, slots: Iterable[Slot]) -> None:
        """Of one rank alone: look at each gradient before autograd adds it to ``.grad``."""
        if self._size == 1:
            self._handles += [self._hook(slot.param) for slot in slots]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Small batches

    def begin_backward(self, window: AccumulationWindow) -> None:
        """A micro-batch that ``window`` has counted is about to be back-propagated."""
        if window.micro_batches <= 1:
            self._parts = []
            self._takes = self._windows % self._every == 0
            self._windows += 1
        self._local = []
        self._is_open = True

    def end_backward(self, window: AccumulationWindow) -> None:
        """It has been; of one rank alone it is a part of its own."""
        if self._is_open and self._size == 1:
            self._add_part(window.last_weight, window.divisor)
        self._is_open = False

    def look(self, bucket: Bucket) -> None:
        """Take in a bucket that holds this rank's gradients."""
        if self._takes and self._size > 1:
            self._local.append(squared_norm(bucket.grads) / self._factor**2)

    def look_sparse(self, slots: Iterable[Slot]) -> None:
        """Take in sparse gradients, which do not travel in buckets."""
        grads = [slot.param.grad for slot in slots] if self._takes and self._size > 1 else []
        self._local += [squared_norm(g) for g in grads if g is not None and g.is_sparse]

    def _add_part(self, weight: Tensor | float, divisor: int) -> None:
        """``.grad`` holds ``scale / divisor * weight * g``; a part without weight does not count."""
        norms, self._local = self._local, []
        if not norms:
            return
        total = torch.stack([norm.double() for norm in norms]).sum()
        total = total * (divisor / self.loss_scale) ** 2
        if isinstance(weight, Tensor):
            counts = (weight > 0).double()
            self._parts.append((counts, torch.where(weight > 0, total / weight, 0.0)))
        elif weight > 0:
            self._parts.append((1.0, total / weight))

    def news(self, window: AccumulationWindow) -> dict[int, Tensor | float]:
        """What goes into the control block, when the last bucket has been filled."""
        if self._size > 1:
            self._add_part(window.weight, window.divisor)
        else:
            self.end_backward(window)
        parts, self._parts = self._parts, []
        mean, self._mean = self._mean, []
        return {
            Control.PARTS: _sum([counts for counts, _ in parts]),
            Control.PART_NORM: _sum([norm for _, norm in parts]),
            Control.MEAN_NORM: _sum(mean),
        }

    # Their average

    def look_averaged(self, buckets: Iterable[Bucket], rest: Iterable[Tensor | None] = ()) -> None:
        """Take in averaged gradients: this rank's slice of each bucket, and on rank 0 ``rest``."""
        if not self._takes:
            return
        found = [bucket.grads.tensor_split(self._size)[self._rank] for bucket in buckets]
        found += [grad for grad in rest if grad is not None and self._rank == 0]
        self._mean += [squared_norm(values) / self.loss_scale**2 for values in found]

    def _hook(self, param: nn.Parameter) -> Any:
        def on_gradient(grad: Tensor) -> None:  # of one backward, summed over the parameter's uses
            if self._takes and self._is_open:
                self._local.append(squared_norm(grad))

        trainable = param.requires_grad
        param.requires_grad_(True)  # as the engine's own hooks: it survives freezing and unfreezing
        handle = param.register_hook(not_traced(on_gradient))  # type: ignore[no-untyped-call]
        param.requires_grad_(trainable)
        return handle


def _sum(values: list[Any]) -> Tensor | float:
    total: Tensor | float = 0.0
    for value in values:
        total = total + (value.double() if isinstance(value, Tensor) else value)
    return total
