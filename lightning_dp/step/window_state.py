"""A checkpoint inside an accumulation window: partial gradients, summed, fit for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.reduction.reducer import Reducer


def window_state(reducer: Reducer) -> dict[str, Any]:
    """Return the window so far, summed over ranks: tensors on the CPU and plain numbers.

    ``.grad`` and the window are left as they are.

    Collective: every rank, between two micro-batches of one window. Blocks. Sends as many bytes as the
    gradients have, once more, and holds one parameter's sum at a time.
    """
    group, window, slots = reducer.group, reducer.window, reducer.registry.slots
    grads: dict[str, Tensor] = {}
    used = torch.tensor([float(slot.param.grad is not None) for slot in slots] or [0.0])
    numbers = torch.tensor(
        [window.weight, float(window.micro_batches), float(window.loss)], dtype=torch.float64
    )
    used, numbers = used.to(group.device), numbers.to(group.device)
    for each in (used, numbers):
        group.all_reduce(each, dist.ReduceOp.SUM)
    for slot, users in zip(slots, used.tolist(), strict=True):
        if users == 0:
            continue
        total = torch.zeros(slot.param.shape, dtype=slot.param.dtype, device=slot.param.device)
        if slot.param.grad is not None:
            grad = slot.param.grad
            total.copy_(grad.to_dense() if grad.is_sparse else grad)
        real = torch.view_as_real(total) if total.is_complex() else total
        group.all_reduce(real, dist.ReduceOp.SUM)
        if group.rank == 0:
            grads[slot.name] = total.cpu()
    weight, micro_batches, loss = numbers.tolist()
    return {
        "grads": grads,
        "weight": weight,
        "micro_batches": int(micro_batches),
        "loss": loss,
        "weighted": window.weighted,
        "given": window.given,
        "divisor": window.divisor,
        "reference": window.reference,
        "position": window.position,
        "world_size": group.world_size,
    }


def load_window_state(reducer: Reducer, state: Mapping[str, Any], divisor: int) -> None:
    """Put a saved window back: everything on rank 0, nothing elsewhere. The next reduction sums it up.

    Args:
        reducer: The engine of this run, of any world size.
        state: What ``window_state`` returned.
        divisor: By what this run's trainer divides losses; gradients saved under another are rescaled.

    Local; every rank calls it.
    """
    window = reducer.window
    window.reset()
    window.weighted = bool(state["weighted"])
    window.divisor = divisor
    window.reference = float(state.get("reference", 1.0))
    # Weights that count something are sums over ranks, whose number does not matter. Where each rank's
    # micro-batch weighs 1, those of the file count as if this run's ranks had made them; in manual
    # optimization each rank has the mean already.
    ranks = reducer.group.world_size / state["world_size"]
    ranks = 1.0 if window.weighted and state.get("given", True) else ranks
    scale = ranks * (state["divisor"] / divisor if window.weighted else 1.0)
    window.position = max(0, round(state["position"] * divisor / state["divisor"]))
    by_name = {slot.name: slot.param for slot in reducer.registry.slots}
    for param in by_name.values():
        param.grad = None
    if reducer.group.rank != 0:
        return
    for name, grad in state["grads"].items():
        if name in by_name:
            param = by_name[name]
            param.grad = grad.to(param.device, param.dtype, copy=True).mul_(scale)
    window.weight = float(state["weight"]) * ranks
    window.micro_batches = int(state["micro_batches"])
    window.loss = float(state["loss"]) * ranks
