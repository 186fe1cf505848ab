"""The exchange inside a step: the optimizer sees this rank's part of each parameter, under the same name.

The optimizer object and its Parameters stay the user's. While it computes, ``.data`` and ``.grad`` of a
parameter that is cut between ranks are flat views of this rank's range; one that belongs to other ranks
has no gradient. What the optimizer writes, it writes into the parameter's own memory; the state that it
makes has the range's shape.

[Note: masters] Of a parameter of half precision the optimizer may see a copy in fp32 instead, its master,
and the gradient in fp32. After the step the master is rounded into the parameter. Between steps it is in
the optimizer's state, under ``MASTER``: so it is cut, saved and loaded with the rest. Where the parameter
is not the rounded master any more, somebody has changed it: there the master follows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.wires.codec import HALF
from lightning_dp.optim.shares import Share, Shares

MASTER = "lean_ddp_master"


class Exchange:
    """What was taken away from one optimizer's parameters, so that it can be put back.

    Args:
        shares: What this rank updates.
        masters: Whether parameters of half precision are updated in fp32.
    """

    def __init__(self, shares: Shares, *, masters: bool = False) -> None:
        self._shares = shares
        self._masters = masters
        self._optimizer: Optimizer | None = None
        self._cut: list[tuple[Tensor, Tensor, Tensor | None]] = []  # parameter, data, gradient
        self._taken: list[tuple[Tensor, Tensor]] = []  # parameter, gradient
        self._touched: dict[int, Bucket] = {}

    def enter(self, optimizer: Optimizer, *, all_of_them: bool = False) -> None:
        """Show ``optimizer`` this rank's parts. Local.

        Args:
            optimizer: Whose parameters.
            all_of_them: Also of parameters without a gradient.
        """
        self._optimizer = optimizer
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
        if bucket is not None:
            self._touched[bucket.index] = bucket
        master = self._take_master(parameter, share)
        if share.is_whole and master is None:
            return
        grad, parameter.grad = parameter.grad, None
        if share.is_empty:
            if grad is not None:
                self._taken.append((parameter, grad))
            return
        self._cut.append((parameter, parameter.data, grad))
        part = grad if grad is None else share.part(in_memory_of(parameter, grad))
        parameter.data = share.part(parameter.data) if master is None else master
        parameter.grad = part if part is None else part.to(parameter.dtype)

    def _take_master(self, parameter: Tensor, share: Share) -> Tensor | None:
        """The part's master, out of the state ([Note: masters]); ``None`` where there is none to be."""
        assert self._optimizer is not None
        if not self._masters or share.is_empty or parameter.dtype not in HALF:
            return None
        state = self._optimizer.state.get(parameter, {})
        if parameter.grad is None and not state:
            return None
        now = share.part(parameter.detach())
        master: Tensor | None = state.pop(MASTER, None)
        if master is None:
            return now.to(torch.float32)
        with torch.no_grad():
            return master.copy_(torch.where(master.to(now.dtype) == now, master, now))

    def leave(self) -> list[Bucket]:
        """Put everything back; return the buckets whose parameters had a gradient. Local, idempotent.

        Which ones they are is the same on all ranks: a gradient is there on all of them or on none.
        """
        for parameter, data, grad in self._cut:
            parameter.grad = None
            part, parameter.data = parameter.data, data
            parameter.grad = grad
            if part.dtype != data.dtype:
                self._keep_master(parameter, part)
        for parameter, grad in self._taken:
            parameter.grad = grad
        touched = [self._touched[index] for index in sorted(self._touched)]
        self._cut, self._taken, self._touched = [], [], {}
        return touched

    @torch.no_grad()
    def _keep_master(self, parameter: Tensor, master: Tensor) -> None:
        share = self._shares.of(parameter)
        assert self._optimizer is not None
        assert share is not None
        share.part(parameter.detach()).copy_(master)  # counts as a change of the parameter
        self._optimizer.state[parameter][MASTER] = master


def in_memory_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """``tensor``, of the parameter's shape, with elements in the order of the parameter's memory."""
    if tensor.stride() == parameter.stride():
        return tensor.detach()
    copy = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach())
