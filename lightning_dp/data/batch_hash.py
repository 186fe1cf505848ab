"""Tell batches apart by a number: to see whether ranks get the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

NOTHING = object()
"""In place of a batch: there is none."""


def batch_fingerprint(batch: Any) -> int:
    """Return an integer below 2**63 that differs, but for bad luck, between different batches."""
    if batch is NOTHING:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor):
            sample = leaf.detach().reshape(-1)[: 1 << 16].cpu().contiguous()
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (bool, int, float, str, bytes)):
            digest.update(repr(leaf).encode())
    return (int.from_bytes(digest.digest(), "little") >> 1) or 1


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield str(key)
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch
