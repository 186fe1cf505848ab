"""A permutation that is computed where it is read: for datasets too large to shuffle in memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lightning_dp.data.order import Order, cut, mix

_ROUNDS = 6
_CHUNK = 1 << 13


class FeistelOrder(Order):
    """A keyed permutation of ``range(total)``, without memory for it.

    The bits of a number are cut into two parts, and each round changes one part by a hash of the other,
    which can be undone and therefore permutes. A result outside the range is permuted again until it
    falls inside ("cycle walking"), which keeps it a permutation of the range.

    Args:
        total: How many numbers to permute, at most 2**62.
        key: Which permutation.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"; Luby and Rackoff 1988.
    """

    def __init__(self, total: int, key: int) -> None:
        self._total = total
        bits = max(2, (total - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        # Multipliers and offsets below 2**31, as the hash needs.
        self._keys = [mix(key, turn) & 0x7FFFFFFF for turn in range(2 * _ROUNDS)]
        self._key = key
        self._positions = range(total)
        self._first, self._read_ahead = 0, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._positions)

    def part(self, positions: range) -> FeistelOrder:
        """See :class:`Order`."""
        part = copy.copy(self)
        part._positions = cut(self._positions, positions)
        part._first, part._read_ahead = 0, torch.empty(0, dtype=torch.int64)
        return part

    def read(self, start: int, stop: int) -> list[int]:
        """See :class:`Order`. Computes a chunk at a time: one call for many batches."""
        if start < self._first or stop > self._first + self._read_ahead.numel():
            chunk = self._positions[start : max(stop, start + _CHUNK)]
            places = torch.arange(chunk.start, chunk.stop, chunk.step, dtype=torch.int64)
            self._first, self._read_ahead = start, self.at(places)
        numbers: list[int] = self._read_ahead[start - self._first : stop - self._first].tolist()
        return numbers

    def fingerprint(self) -> int:
        """See :class:`Order`."""
        return mix(5, self._total, self._key)

    def at(self, places: Tensor) -> Tensor:
        """Return the numbers at ``places``.

        Args:
            places: int64, any shape, each from 0 to ``total - 1``.
        """
        numbers = self._once(places)
        outside = numbers >= self._total
        while bool(
            outside.any()
        ):  # the domain is less than twice the range: on average one more turn
            numbers[outside] = self._once(numbers[outside])
            outside = numbers >= self._total
        return numbers

    def _once(self, numbers: Tensor) -> Tensor:
        high, low = numbers >> self._low_bits, numbers & self._low_mask
        for turn in range(_ROUNDS):
            add, multiply = self._keys[2 * turn], self._keys[2 * turn + 1] | 1
            if turn % 2 == 0:
                high ^= _hash(low, add, multiply).bitwise_and_(self._high_mask)
            else:
                low ^= _hash(high, add, multiply).bitwise_and_(self._low_mask)
        return (high << self._low_bits).bitwise_or_(low)


def _hash(part: Tensor, add: int, multiply: int) -> Tensor:
    """Mix ``part`` (below 2**31) into a new tensor; every product stays below 2**63, so no sign appears."""
    mixed = (part + add).mul_(0x45D9F3B)
    mixed ^= mixed >> 16
    mixed.bitwise_and_(0x7FFFFFFF).mul_(multiply)
    return mixed.bitwise_xor_(mixed >> 29)
