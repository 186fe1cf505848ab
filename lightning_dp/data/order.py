"""The order of an epoch: a function of (seed, epoch, pass) and of nothing else.

Every rank computes the same order and takes a slice of it. Neither the number of ranks nor that of
workers enters here, so a run can stop on two ranks and go on with three, in the same permutation.

An order holds *units*: dataset indices, or whole batches where a user's batch sampler makes them.
Indices are kept as integer tensors (or computed when asked for), never as a Python list of all of them.
"""

from __future__ import annotations

import hashlib
import pickle
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a well-mixed integer below 2**63 that depends on every part and on their order.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (splitmix64).
    """
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class OrderKey:
    """What an order depends on.

    Attributes:
        seed: One number for the whole run, the same on all ranks.
        epoch: Counted from 0.
        pass_index: How often the loader was exhausted before in this epoch (a short loader that is
            cycled next to a longer one). Each pass is another permutation.
    """

    seed: int
    epoch: int
    pass_index: int = 0

    @property
    def torch_seed(self) -> int:
        """A seed for a generator: ``seed + epoch`` as in DistributedSampler; mixed for later passes."""
        if self.pass_index == 0:
            return self.seed + self.epoch
        return mix(self.seed, self.epoch, self.pass_index)


class Order(ABC):
    """Units in order: all of one pass, or a rank's part of them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def part(self, positions: range) -> Order:
        """Return the units at ``positions`` (all below ``len(self)``), in no more memory than they need."""

    @abstractmethod
    def read(self, start: int, stop: int) -> list[Any]:
        """Return the units ``start`` to ``stop - 1``."""

    @abstractmethod
    def fingerprint(self) -> int:
        """Return an integer below 2**63 that differs, but for bad luck, between different orders."""


class _UnitsOrder(Order):
    """Units that something holds which can be cut: a range, a list, a tensor."""

    def __init__(self, units: Any) -> None:
        self.units = units

    def __len__(self) -> int:
        return len(self.units)

    def part(self, positions: range) -> Order:
        """See :class:`Order`."""
        return type(self)(cut(self.units, positions))

    def read(self, start: int, stop: int) -> list[Any]:
        """See :class:`Order`."""
        return list(self.units[start:stop])


class SequentialOrder(_UnitsOrder):
    """An arithmetic sequence, such as 0, 1, 2, ..., as a range. Needs no memory."""

    def fingerprint(self) -> int:
        """See :class:`Order`."""
        return mix(1, len(self))


class TensorOrder(_UnitsOrder):
    """Indices in an integer tensor of shape ``(total,)``."""

    def part(self, positions: range) -> Order:
        """See :class:`Order`."""
        # A copy: a strided view would keep all ranks' indices alive for the whole epoch.
        return TensorOrder(cut(self.units, positions).clone())

    def read(self, start: int, stop: int) -> list[int]:
        """See :class:`Order`."""
        indices: list[int] = self.units[start:stop].tolist()
        return indices

    def fingerprint(self) -> int:
        """See :class:`Order`."""
        return mix(2, len(self), _digest(self.units))


class RaggedOrder(Order):
    """Batches of indices of different lengths, as one flat tensor and the places where batches begin."""

    def __init__(self, flat: Tensor, offsets: Tensor, batches: range | None = None) -> None:
        self.flat = flat
        self.offsets = offsets
        self._batches = range(offsets.numel() - 1) if batches is None else batches

    def __len__(self) -> int:
        return len(self._batches)

    def part(self, positions: range) -> RaggedOrder:
        """See :class:`Order`."""
        return RaggedOrder(self.flat, self.offsets, cut(self._batches, positions))

    def read(self, start: int, stop: int) -> list[list[int]]:
        """See :class:`Order`."""
        bounds = [self.offsets[at : at + 2].tolist() for at in self._batches[start:stop]]
        return [self.flat[first:last].tolist() for first, last in bounds]

    def fingerprint(self) -> int:
        """See :class:`Order`."""
        return mix(3, len(self), _digest(self.flat), _digest(self.offsets))


class ListOrder(_UnitsOrder):
    """Units that are not integers (a key, or an index with a size), as a sampler yielded them."""

    def fingerprint(self) -> int:
        """See :class:`Order`."""
        digest = hashlib.blake2b(digest_size=8)
        for unit in self.units:
            try:
                digest.update(pickle.dumps(unit))
            except Exception:  # any object may refuse, in any way; the length still counts
                digest.update(b"?")
        return mix(4, len(self.units), int.from_bytes(digest.digest(), "little"))


def cut(units: Any, positions: range) -> Any:
    """Return ``units`` (a range, list or tensor) at ascending ``positions``."""
    return units[positions.start : positions.stop : positions.step]


def collect(units: Iterable[Any]) -> Order:
    """Gather what a sampler yields; integers are packed 8 bytes each as they come."""
    packed = array("q")
    iterator = iter(units)
    for unit in iterator:
        try:
            packed.append(unit)
        except TypeError:
            return ListOrder([*packed, unit, *iterator])
    return TensorOrder(_as_tensor(packed))


def collect_batches(batches: Iterable[Any]) -> Order:
    """Gather what a batch sampler yields; batches of integers are packed as they come."""
    flat, offsets = array("q"), array("q", [0])
    iterator = iter(batches)
    for batch in iterator:
        batch = list(batch)
        try:
            flat.extend(batch)
        except TypeError:
            del flat[offsets[-1] :]  # the integers before the one that was none
            whole = RaggedOrder(_as_tensor(flat), _as_tensor(offsets))
            return ListOrder([*whole.read(0, len(whole)), batch, *map(list, iterator)])
        offsets.append(len(flat))
    return RaggedOrder(_as_tensor(flat), _as_tensor(offsets))


def _as_tensor(packed: array[int]) -> Tensor:
    if not packed:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(packed, dtype=torch.int64)


def _digest(values: Tensor) -> int:
    content = hashlib.blake2b(values.contiguous().numpy().data, digest_size=8).digest()
    return int.from_bytes(content, "little")
