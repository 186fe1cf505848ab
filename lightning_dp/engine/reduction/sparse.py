"""Gradients of ``Embedding(sparse=True)``: rows that were used, gathered instead of all-reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.group import ReplicaGroup


def reduce_sparse(slots: Sequence[Slot], group: ReplicaGroup) -> None:
    """Average sparse gradients over replicas; ``.grad`` becomes a coalesced sparse tensor or ``None``.

    A dense gradient on some rank (a step that used the weight densely) is taken as all of its rows.
    Every rank concatenates the ranks' rows in rank order, so all sum them in the same order.

    Args:
        slots: The same slots on every rank, in the same order.
        group: Who takes part.

    Collective: every rank, after the last bucket was launched. Blocks.
    """
    local = [_as_sparse(slot.param.grad) for slot in slots]
    sizes = torch.tensor(
        [[-1 if grad is None else len(grad.values()) for grad in local]],
        dtype=torch.int64,
        device=group.device,
    )
    rows = torch.cat(group.all_gather(sizes)).tolist()  # [rank][slot]
    for position, (slot, grad) in enumerate(zip(slots, local, strict=True)):
        counts = [row[position] for row in rows]
        if all(count < 0 for count in counts):
            slot.param.grad = None
            continue
        slot.param.grad = _gather_rows(slot.param, grad, [max(0, c) for c in counts], group)


def _as_sparse(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    if not grad.is_sparse:
        return grad.detach().to_sparse(1).coalesce()
    return grad.detach().coalesce()


def _gather_rows(
    param: Tensor, grad: Tensor | None, counts: list[int], group: ReplicaGroup
) -> Tensor:
    most = max(counts)
    if grad is not None and grad.sparse_dim() != 1:
        grad = grad.to_dense().to_sparse(1).coalesce()
    shape = tuple(param.shape[1:])
    index = torch.zeros(most, dtype=torch.int64, device=param.device)
    value = torch.zeros((most, *shape), dtype=param.dtype, device=param.device)
    if grad is not None:
        index[: counts[group.rank]] = grad.indices()[0]
        value[: counts[group.rank]] = grad.values()
    indices, values = group.all_gather(index), group.all_gather(value)
    index = torch.cat([each[:n] for each, n in zip(indices, counts, strict=True)])
    value = torch.cat([each[:n] for each, n in zip(values, counts, strict=True)])
    total = torch.sparse_coo_tensor(
        index.unsqueeze(0), value / group.world_size, param.shape, check_invariants=False
    )
    return total.coalesce()
