"""Look at local gradients before they are averaged: norms on their device, names when asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.control import Control
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.failure import gather_names
from lightning_dp.errors import NonFiniteGradientError, some_names
from lightning_dp.internals.autograd import norms_of

log = logging.getLogger(__name__)


class FiniteCheck:
    """Norms of one reduction's local gradients. Costs one pass over them and no host read.

    Args:
        factor: What gradients in buckets were multiplied with.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._slots: list[Slot] = []
        self._squared: list[
            Tensor
        ] = []  # shape (slots,) each, float64: no norm overflows before its gradient

    def look(self, bucket: Bucket) -> None:
        """Take in a bucket that holds this rank's gradients."""
        views = [slot.view for slot in bucket.slots if slot.view is not None]
        norms = norms_of(views)
        self._slots += bucket.slots
        self._squared.append((norms / self._factor).square())

    def look_sparse(self, slots: Iterable[Slot]) -> None:
        """Take in sparse gradients, which do not travel in buckets."""
        for slot in slots:
            grad = slot.param.grad
            if grad is not None and grad.is_sparse:
                values = grad.detach().coalesce().values()
                self._slots.append(slot)
                self._squared.append(values.abs().double().square().sum().reshape(1))

    def news(self, _: object) -> dict[int, Tensor | float]:
        """What goes into the control block, when the last bucket has been filled."""
        return {Control.NON_FINITE: self.found, Control.SQUARED_NORM: self.squared_norm}

    @property
    def squared_norm(self) -> Tensor | float:
        """Of all gradients together, shape ``()``."""
        return torch.cat(self._squared).sum() if self._squared else 0.0

    @property
    def found(self) -> Tensor | float:
        """1 if some gradient holds inf or NaN, shape ``()``."""
        if not self._squared:
            return 0.0
        return (~torch.isfinite(torch.cat(self._squared))).any().double()

    def names(self) -> list[str]:
        """Parameters whose gradient holds inf or NaN. The host reads."""
        if not self._squared:
            return []
        finite = torch.isfinite(torch.cat(self._squared)).tolist()
        return [slot.name for slot, fine in zip(self._slots, finite, strict=True) if not fine]


def say_non_finite(local: list[str], group: ReplicaGroup, *, raises: bool) -> None:
    """Say on every rank whose gradients were not finite.

    Args:
        local: Names of parameters, on this rank.
        group: Who takes part.
        raises: Or warn.

    Raises:
        NonFiniteGradientError: With ``raises``.

    Collective: every rank, once all know of it. Blocks.
    """
    names, ranks = gather_names(group, local)
    message = (
        f"[rank {group.rank}] gradients of {some_names(names)} held inf or NaN on rank(s) {ranks}"
        " before they were averaged. Look at that rank's batch; lower the learning rate or clip."
    )
    if raises:
        raise NonFiniteGradientError(message, names=names, ranks=ranks)
    log.warning(message)
