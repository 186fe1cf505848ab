"""What ranks hold of their own, on its way into a checkpoint and out of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


def to_cpu(value: Any) -> Any:
    """Copy tensors in dictionaries, lists and tuples to the CPU; the rest is returned as it is."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_cpu(item) for item in value)
    return value


def take_own(checkpoint: MutableMapping[str, Any], rank: int, world_size: int) -> None:
    """Put in place of rank 0's optimizer state this rank's own, if as many ranks saved it. Local."""
    saved = checkpoint.get("lean_ddp", {}).get("outer")
    if saved is not None and saved["ranks"] and saved["world_size"] == world_size:
        checkpoint.update(saved["ranks"][rank]["own"])


def steps_since(saved: Mapping[str, Any]) -> int:
    """Local steps that are not in a checkpoint's own weights."""
    rounds = [part.get("rounds", ()) for part in saved["ranks"]]
    return max((steps for own in rounds for *_, steps in own), default=0)


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of tensors of one shape, in double precision; the plain one where nobody weighs."""
    total = sum(weights)
    shares = [weight / total for weight in weights] if total else [1 / len(tensors)] * len(tensors)
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack(
        [tensor.to(wide) * share for tensor, share in zip(tensors, shares, strict=True)]
    ).sum(dim=0)
