"""Gradients into their buckets and out again; the one writer of ``.grad`` of what is in a bucket.

While a bucket is under way, ``.grad`` of its parameters is empty: nothing can write into memory that is
in flight. Afterwards ``.grad`` is a view of the bucket, a copy of it where the parameter has another
dtype, or stays ``None``.

[Note: unused parameters] Used on no rank means ``.grad`` stays ``None``, as on one device: momentum and
weight decay must not move a dead weight. The host reads flags only if something was unused here, so the
usual step costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slot, changed_shape
from lightning_dp.internals.autograd import copy_all


@torch.no_grad()
def copy_early(slot: Slot, reduction: int, factor: float) -> None:
    """Copy one large gradient into its bucket now, while the processor's cache still holds it.

    One copy a parameter costs a call each; for large ones on a CPU, fetching them from memory again when
    the bucket leaves costs more. The memory that it frees is warm for the next layer's.

    Args:
        slot: Its gradient has just arrived.
        reduction: The number of the reduction that is open.
        factor: What the gradient is multiplied with.
    """
    grad = slot.param.grad
    if grad is None or grad is slot.grad_view or grad.is_sparse:
        return
    bucket = slot.bucket
    assert bucket is not None
    bucket.allocate()
    assert slot.view is not None
    if grad.shape != slot.view.shape:
        raise changed_shape(slot, slot.view.shape)
    if factor == 1.0:
        slot.view.copy_(grad)
    else:
        torch.mul(grad, factor, out=slot.view)
    slot.param.grad = None
    slot.copied_in = reduction


@torch.no_grad()  # a gradient of ``create_graph`` is copied, not differentiated
def copy_in(bucket: Bucket, reduction: int, factor: float, *, empty: bool = False) -> None:
    """Copy local gradients into ``bucket``, in one fused copy, and take them away from ``.grad``.

    A parameter without a gradient contributes zeros and a zero flag.

    Args:
        bucket: Allocated here if need be.
        reduction: The number of the reduction that is open.
        factor: What each gradient is multiplied with.
        empty: Send zeros whatever there is: this rank's backward has failed.
    """
    bucket.allocate()
    bucket.unused.clear()
    late: list[Tensor] = []  # large ones that were not copied when they arrived
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for position, slot in enumerate(bucket.slots):
        view, grad = slot.view, slot.param.grad
        assert view is not None
        if slot.copied_in == reduction and not empty:
            if grad is not None:
                view.add_(grad.detach(), alpha=factor)  # it fired again before the bucket left
        elif grad is None or empty or slot.removed:
            view.zero_()
            if not slot.removed:
                bucket.unused.append(position)
        else:
            if grad is not slot.grad_view:
                plain = slot.grad_view is not None and not slot.is_complex and not grad.is_sparse
                targets.append(view)
                sources.append(grad if plain else _source(slot, grad))
            if factor != 1.0 and position < bucket.early_slots:
                late.append(view)
        slot.param.grad = None
    if targets:
        _copy(bucket, targets, sources)
    if factor != 1.0:
        bucket.not_early.mul_(factor)
        for view in late:
            view.mul_(factor)
    bucket.flags.fill_(factor)
    for position in bucket.unused:
        bucket.flags[position] = 0


def _copy(bucket: Bucket, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all at once; a gradient of another shape than its place would be broadcast, or raise unnamed."""
    whole = len(targets) == len(bucket.slots)
    if not whole or sum(map(Tensor.numel, sources)) != bucket.slots_numel:
        for view, source in zip(targets, sources, strict=True):
            if source.shape != view.shape:
                slot = next(slot for slot in bucket.slots if slot.view is view)
                raise changed_shape(slot, view.shape)
    copy_all(targets, sources)


def _source(slot: Slot, grad: Tensor) -> Tensor:
    """Return what is copied in; keep a gradient of another dtype, so that its memory can be used again."""
    if slot.grad_view is None and not grad.is_sparse:
        slot.local_grad = grad
    return _real_and_dense(grad) if slot.is_complex or grad.is_sparse else grad


def _real_and_dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.to_dense()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def copy_out_used(bucket: Bucket) -> None:
    """Point ``.grad`` at the bucket where this rank had a gradient of the bucket's dtype."""
    if not bucket.unused:
        for slot in bucket.slots:
            slot.param.grad = slot.grad_view
        return
    unused = set(bucket.unused)
    for position, slot in enumerate(bucket.slots):
        if position not in unused:
            slot.param.grad = slot.grad_view


def copy_out_rest(buckets: Sequence[Bucket]) -> None:
    """Give gradients to parameters that were used elsewhere only, and to those of another dtype.

    Reads used-flags, of all buckets in one copy, if a parameter was unused here ([Note: unused
    parameters]).
    """
    asked = [bucket for bucket in buckets if bucket.unused]
    flags: list[float] = torch.cat([b.flags.float() for b in asked]).tolist() if asked else []
    for bucket in buckets:
        dead: set[int] = set()
        if bucket.unused:
            mine, flags = flags[: len(bucket.slots)], flags[len(bucket.slots) :]
            dead = {position for position in bucket.unused if mine[position] == 0}
            for position in bucket.unused:
                if position not in dead:
                    bucket.slots[position].param.grad = bucket.slots[position].grad_view
        if all(bucket.same_dtype):
            continue
        for position, slot in enumerate(bucket.slots):
            if slot.grad_view is None and position not in dead:
                _copy_back(slot)
        if not any(bucket.same_dtype):
            bucket.release()


def _copy_back(slot: Slot) -> None:
    assert slot.view is not None
    grad = slot.local_grad.detach() if slot.local_grad is not None else torch.empty_like(slot.param)
    slot.local_grad = None
    (torch.view_as_real(grad) if grad.is_complex() else grad).copy_(slot.view)
    slot.param.grad = grad.detach()


def scale(grads: Iterable[Tensor | None], factor: Tensor | float) -> None:
    """Multiply gradients in place; by a plain 1 they are not touched."""
    if isinstance(factor, float) and factor == 1.0:
        return
    for grad in grads:
        if grad is not None:
            grad.mul_(factor)


def clear(slots: Iterable[Slot]) -> None:
    """Drop all gradients: one that was not averaged must not be stepped on by whoever goes on."""
    for slot in slots:
        slot.param.grad = slot.local_grad = None
