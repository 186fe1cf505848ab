"""Fewer bytes for a bucket's slices: half types, and eight bits with a scale a block.

A codec turns ``n`` numbers into one row of a message and back. Rows are added after decoding, in fp32:
codes are never summed, so that the error does not grow with the number of ranks.

[Note: not finite stays not finite] A half type has inf and NaN of its own. With eight bits a block that
holds one gets the scale NaN, so that all of it is NaN on every rank: checks and loss scalers see it.

Source: scales that travel with their blocks, sums in fp32 and one rounding as in ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# On a CPU so many are coded at a time: what several passes work on stays in its cache.
CACHED_NUMBERS = 256 * 1024
LARGEST = 127  # of a code; -128 is not used, so that codes are symmetric
LEAST = (
    1e-35  # a block of smaller numbers gets this one's scale: its own would not be a normal number
)


class Codec(Protocol):
    """How numbers of fp32 are written in a message.

    Attributes:
        name: As in options.
        block: Of how many elements a slice must be a multiple.
        ratio: Bytes of a message, as a multiple of those of fp32.
    """

    name: str
    block: int
    ratio: float

    def message(self, rows: int, n: int) -> Tensor:
        """Shape ``(rows, m)`` and dtype of a message of ``rows`` rows of ``n`` numbers; without memory."""

    def encode(self, values: Tensor, rows: Tensor) -> None:
        """Write ``values``, shape ``(k, n)``, into ``rows``, shape ``(k, m)``."""

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """Read ``rows``, shape ``(k, m)``, into ``out``, shape ``(k, n)``."""

    def add(self, row: Tensor, out: Tensor) -> None:
        """Read ``row``, shape ``(1, m)``, and add it to ``out``, shape ``(1, n)``."""


class Half:
    """Numbers of half precision.

    Args:
        dtype: ``torch.bfloat16``, with the range of fp32 and 8 bits of precision, or ``torch.float16``,
            with 11 bits for what lies between 6e-5 and 65504.
    """

    block = 1
    ratio = 0.5

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._scratch = Scratch()
        self.name = "bf16" if dtype == torch.bfloat16 else "fp16"

    def message(self, rows: int, n: int) -> Tensor:
        """As the protocol's."""
        return torch.empty(rows, n, dtype=self.dtype, device="meta")

    def encode(self, values: Tensor, rows: Tensor) -> None:
        """As the protocol's."""
        rows.copy_(values)

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        out.copy_(rows)

    def add(self, row: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        for some, theirs in pieces(row, out):
            # Two steps are faster than an addition of two types.
            theirs.add_(self._scratch.like(theirs).copy_(some))


class Int8:
    """Eight bits a number; a row is ``[codes | one fp32 scale a block]``.

    Args:
        block: Numbers that share a scale; a power of two, at least 16.
    """

    name = "int8"

    def __init__(self, block: int = 256) -> None:
        self.block = block
        self.ratio = (1 + 4 / block) / 4
        self._scratch = Scratch()

    def message(self, rows: int, n: int) -> Tensor:
        """As the protocol's."""
        return torch.empty(rows, n + 4 * (n // self.block), dtype=torch.uint8, device="meta")

    def encode(self, values: Tensor, rows: Tensor) -> None:
        """As the protocol's. Rounds to nearest."""
        whole = self._parts(rows, values.shape[1])
        for blocks, codes, scales in pieces(values.view(whole[0].shape), *whole):
            largest = torch.maximum(blocks.amax(2), blocks.amin(2).neg_()).clamp_(min=LEAST)
            # The second term is NaN where the first is not finite, else 0.
            torch.add(largest / LARGEST, largest - largest, out=scales)
            scaled = self._scratch.like(blocks)
            codes.copy_(torch.mul(blocks, (LARGEST / largest).unsqueeze(2), out=scaled).round_())

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        whole = self._parts(rows, out.shape[1])
        for codes, scales, blocks in pieces(*whole, out.view(whole[0].shape)):
            blocks.copy_(codes).mul_(scales.unsqueeze(2))

    def add(self, row: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        whole = self._parts(row, out.shape[1])
        for codes, scales, blocks in pieces(*whole, out.view(whole[0].shape)):
            blocks.addcmul_(self._scratch.like(blocks).copy_(codes), scales.unsqueeze(2))

    def _parts(self, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return views: codes ``(k, blocks, block)``, scales ``(k, blocks)``."""
        codes = rows[:, :n].view(torch.int8).view(len(rows), -1, self.block)
        return codes, rows[:, n:].view(torch.float32)


class Scratch:
    """Memory of fp32 that is used again: fresh memory would cost more than the arithmetic in it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def like(self, values: Tensor) -> Tensor:
        """Memory of the shape of ``values``, on their device, with anything in it."""
        n = values.numel()
        if self._flat.numel() < n or self._flat.device != values.device:
            self._flat = torch.empty(n, device=values.device)
        return self._flat[:n].view(values.shape)


def pieces(*views: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors alike along their first two sizes, which are equal.

    A piece has at most ``CACHED_NUMBERS`` of the longest. A device gets them whole: each call costs there.
    """
    first = views[0]
    if first.device.type != "cpu":
        yield views
        return
    rows, columns = first.shape[:2]
    width = max(1, max(view.numel() for view in views) // max(1, rows * columns))
    across = max(1, min(columns, CACHED_NUMBERS // width))
    down = max(1, CACHED_NUMBERS // (across * width))
    for row in range(0, rows, down):
        for column in range(0, columns, across):
            yield tuple(view[row : row + down, column : column + across] for view in views)


def add_rows(rows: Tensor, out: Tensor) -> None:
    """Put the sum of ``rows``, shape ``(K, n)``, into ``out``, shape ``(n,)``, in the order of rows.

    Numbers of half precision are added in fp32; the sum is rounded once.

    Args:
        rows: One a rank.
        out: Floating, of the same dtype.
    """
    half = out.dtype in HALF
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device) if half else out
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row.float() if half else row)
    if half:
        out.copy_(total)


def encode_others(codec: Codec, values: Tensor, rows: Tensor, own: int) -> None:
    """Write ``values``, shape ``(K, n)``, into ``rows``, shape ``(K, m)``, but for row ``own``.

    What a rank sends to itself does not travel, so it is neither rounded nor worked on.
    """
    for part in (slice(own), slice(own + 1, None)):
        if len(rows[part]):
            codec.encode(values[part], rows[part])


def add_others(codec: Codec, rows: Tensor, out: Tensor, own: int) -> None:
    """Add ``rows``, shape ``(K, m)``, to ``out``, shape ``(n,)``, which is row ``own``'s numbers, fp32."""
    for position in range(len(rows)):
        if position != own:
            codec.add(rows[position : position + 1], out.unsqueeze(0))
