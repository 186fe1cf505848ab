"""Who reads all gradients, where each rank has the mean of its own slices only.

[Note: zeros elsewhere] Outside of a rank's slices ``.grad`` is zero. So every rank has the same gradients
as without shares, in the same order, and what is summed over them is right once it is summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.internals.gradients import own_found_inf, own_total_norm


class GradientReaders:
    """Norms for clipping, and what a loss scaler looks for, over the gradients of all ranks.

    Args:
        slots: Yields all slots.
        group: Who takes part.
    """

    def __init__(self, slots: Callable[[], Iterable[Slot]], group: ReplicaGroup) -> None:
        self._slots = slots
        self._group = group
        self._undo = [
            undo
            for undo in (own_total_norm(self._total_norm), own_found_inf(self._found_inf))
            if undo is not None
        ]

    @staticmethod
    def are_known() -> bool:
        """Whether torch has the names that are needed. Local."""
        undos = [own_total_norm(lambda original, *a, **k: original(*a, **k))]
        undos.append(own_found_inf(lambda *_: None))
        for undo in undos:
            if undo is not None:
                undo()
        return None not in undos

    def close(self) -> None:
        """Let torch read gradients as before. Local."""
        while self._undo:
            self._undo.pop()()

    def _total_norm(
        self,
        original: Callable[..., Tensor],
        tensors: Any,
        norm_type: float,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """The norm of ``tensors`` over all ranks, where some of them are in slices.

        Collective: every rank, if one of the tensors is a gradient in slices.
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        in_slices = {id(slot.param.grad) for slot in self._slots() if slot.sliced}
        mine = [tensor for tensor in tensors if id(tensor) in in_slices]
        if not mine:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        # What every rank has whole is counted by one.
        whole = [tensor for tensor in tensors if id(tensor) not in in_slices]
        power = float(norm_type)
        total = _power(original(mine, power, False, foreach), power)
        if whole and self._group.rank == 0:
            total = _join(total, _power(original(whole, power, False, foreach), power), power)
        self._reduce(total, dist.ReduceOp.MAX if power == float("inf") else dist.ReduceOp.SUM)
        norm = total if power == float("inf") else total ** (1 / power)
        norm = norm.to(tensors[0].dtype).reshape(())
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The norm of order {power} of all gradients is not finite, so they cannot be clipped."
            )
        return norm

    def _found_inf(self, optimizer: Optimizer, found: Tensor) -> None:
        """Make what one rank found in its slices known to all: they skip the step together.

        Collective: every rank.
        """
        self._reduce(found, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, op: Any) -> None:
        if op == dist.ReduceOp.MAX:
            value.nan_to_num_(nan=float("inf"))  # a maximum may lose it
        self._group.all_reduce(value, op, "a number over all gradients")


def _power(norm: Tensor, power: float) -> Tensor:
    wide = norm.to(torch.float64)
    return wide if power == float("inf") else wide**power


def _join(a: Tensor, b: Tensor, power: float) -> Tensor:
    return torch.maximum(a, b) if power == float("inf") else a + b
