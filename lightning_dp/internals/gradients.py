"""Private names of torch that read all gradients, one small function each, with its fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.internals.patch import patched


def own_total_norm(norm: Callable[..., Tensor]) -> Callable[[], None] | None:
    """Let ``norm(original, tensors, norm_type, ...)`` be what ``clip_grad_norm_`` clips by.

    The function below it is exchanged, so that it holds for a ``clip_grad_norm_`` imported earlier by name.

    Returns:
        Undoes it; ``None`` where torch has no such name.
    """
    module = torch.nn.utils.clip_grad
    original = getattr(module, "_get_total_norm", None)
    if original is None:
        return None

    def total(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        return norm(original, tensors, norm_type, *args, **kwargs)

    return patched(module, "_get_total_norm", total)


def own_found_inf(share: Callable[[Optimizer, Tensor], None]) -> Callable[[], None] | None:
    """Let ``share(optimizer, found_inf)`` see whether gradients overflowed, before a scaler acts on it.

    Args:
        share: May change ``found_inf``, shape ``()`` or ``(1,)``, in place.

    Returns:
        Undoes it; ``None`` where torch has no such name.
    """
    scaler = torch.amp.GradScaler
    original = getattr(scaler, "_unscale_grads_", None)
    if original is None:
        return None

    def unscale(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = original(self, optimizer, *args, **kwargs)
        for each in found.values():
            share(optimizer, each)
        return found

    return patched(scaler, "_unscale_grads_", unscale)
