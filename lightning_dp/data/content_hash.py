"""Tell batches, and selections of a dataset, apart by a number: to see whether ranks have the same."""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset

from lightning_dp.data.order import mix

NOTHING = object()
"""In place of a batch: there is none."""


class _ContentPickler(pickle.Pickler):
    """Writes what an object holds: tensors by value, and local classes and functions by name."""

    def persistent_id(self, value: Any) -> Any:
        """Give a dense tensor by shape, dtype and bytes; leave the rest to pickle."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(value.shape), str(value.dtype), content.numpy().tobytes()

    def reducer_override(self, value: Any) -> Any:
        """Name what cannot be imported."""
        name = getattr(value, "__qualname__", "")
        if callable(value) and ("<locals>" in name or "<lambda>" in name):
            return str, (f"{value.__module__}.{name}",)
        return NotImplemented


def content_hash(value: Any) -> int:
    """Return an integer below 2**63 that differs, but for bad luck, between what differs in content.

    Two values of equal content may differ too, where an object says something else each time (a set of
    strings, an address). 0 for ``NOTHING``, and for what cannot be told: nothing may follow from it.
    """
    if value is NOTHING:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    file: Any = SimpleNamespace(write=digest.update)
    try:
        _ContentPickler(file, protocol=5).dump(value)
    except Exception:  # any object may refuse, in any way
        return 0
    return (int.from_bytes(digest.digest(), "little") >> 1) or 1


def selection_hash(dataset: Any) -> int:
    """Return a hash of the indices that ``dataset``, and those it is made of, select. Loads no sample."""
    return mix(*_selections(dataset, set()))


def _selections(dataset: Any, seen: set[int]) -> Iterator[int]:
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    inside: Sequence[Any]
    if isinstance(dataset, ConcatDataset):
        inside = dataset.datasets
    else:
        own = getattr(dataset, "__dict__", {})
        indices = own.get("indices")  # of torch's Subset, and of what is like it
        if isinstance(indices, Sequence):
            with suppress(TypeError, OverflowError):  # not all integers: slower
                indices = array("q", indices).tobytes()
        if indices is not None:
            yield content_hash(indices)
        inside = [value for value in own.values() if isinstance(value, Dataset)]
    for each in inside:
        yield from _selections(each, seen)
