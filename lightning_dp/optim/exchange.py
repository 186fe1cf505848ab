"""The exchange inside a step: the optimizer sees this rank's part of each parameter, under the same name.

The optimizer object and its Parameters stay the user's. While it computes, ``.data`` and ``.grad`` of a
parameter that is cut between ranks are flat views of this rank's range; one that belongs to other ranks
has no gradient. What the optimizer writes, it writes into the parameter's own memory; the state that it
makes has the range's shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Bucket
from lightning_dp.optim.shares import Share, Shares


class Exchange:
    """What was taken away from one optimizer's parameters, so that it can be put back.

    Args:
        shares: What this rank updates.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._cut: list[tuple[Tensor, Tensor, Tensor | None]] = []  # parameter, data, gradient
        self._taken: list[tuple[Tensor, Tensor]] = []  # parameter, gradient
        self._touched: dict[int, Bucket] = {}

    def enter(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Show ``optimizer`` this rank's parts. Local.

        Args:
            optimizer: Whose parameters.
            all_of_them: Also of parameters without a gradient.
        """
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    share = self._shares.of(parameter)
                    if share is not None and (all_of_them or parameter.grad is not None):
                        self._show(parameter, share)
        except BaseException:
            self.leave()
            raise

    def _show(self, parameter: Tensor, share: Share) -> None:
        bucket = share.slot.bucket
        assert bucket is not None
        self._touched[bucket.index] = bucket
        if share.is_whole:
            return
        grad, parameter.grad = parameter.grad, None
        if share.is_empty:
            if grad is not None:
                self._taken.append((parameter, grad))
            return
        self._cut.append((parameter, parameter.data, grad))
        part = share.of(in_memory_of(parameter, grad)) if grad is not None else None
        parameter.data = share.of(parameter.data)
        parameter.grad = part

    def leave(self) -> list[Bucket]:
        """Put everything back; return the buckets whose parameters had a gradient. Local, idempotent.

        Which ones they are is the same on all ranks: a gradient is there on all of them or on none.
        """
        for parameter, data, grad in self._cut:
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
        for parameter, grad in self._taken:
            parameter.grad = grad
        touched = [self._touched[index] for index in sorted(self._touched)]
        self._cut, self._taken, self._touched = [], [], {}
        return touched


def in_memory_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """``tensor``, of the parameter's shape, with elements in the order of the parameter's memory."""
    if tensor.stride() == parameter.stride():
        return tensor.detach()
    copy = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach())
