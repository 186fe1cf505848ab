"""After a reduction: ``.grad`` becomes a view of its bucket, a copy of it, or stays ``None``."""

from __future__ import annotations

import torch

from lightning_dp.engine.bucket import Bucket, Slot


def hand_back_used(bucket: Bucket) -> None:
    """Point ``.grad`` at the bucket where this rank had a gradient of the bucket's dtype."""
    if not bucket.unused:
        for slot in bucket.slots:
            slot.param.grad = slot.grad_view
        return
    unused = set(bucket.unused)
    for position, slot in enumerate(bucket.slots):
        if position not in unused:
            slot.param.grad = slot.grad_view


def hand_back_rest(bucket: Bucket) -> None:
    """Give gradients to parameters that were used elsewhere only, and to those of another dtype.

    [Note: unused parameters] Used on no rank means ``.grad`` stays ``None``, as on one device:
    momentum and weight decay must not move a dead weight. The host reads flags only if something was
    unused here, so the usual step costs nothing.
    """
    dead: set[int] = set()
    if bucket.unused:
        flags = bucket.flags.tolist()
        dead = {position for position in bucket.unused if flags[position] == 0}
        for position in bucket.unused:
            if position not in dead:
                bucket.slots[position].param.grad = bucket.slots[position].grad_view
    if all(bucket.same_dtype):
        return
    for position, slot in enumerate(bucket.slots):
        if slot.grad_view is None and position not in dead:
            _copy_back(slot)
    if not any(bucket.same_dtype):
        bucket.release()


def _copy_back(slot: Slot) -> None:
    assert slot.view is not None
    grad = slot.kept.detach() if slot.kept is not None else torch.empty_like(slot.param)
    slot.kept = None
    (torch.view_as_real(grad) if grad.is_complex() else grad).copy_(slot.view)
    slot.param.grad = grad.detach()
