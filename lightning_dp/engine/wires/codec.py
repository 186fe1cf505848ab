"""Fewer bytes for a bucket's slices: half types, and eight bits with a scale a block.

A codec turns ``n`` numbers into one row of a message and back. Rows are added after decoding, in fp32:
codes are never summed, so that the error does not grow with the number of ranks.

[Note: not finite stays not finite] A half type has inf and NaN of its own. With eight bits a block that
holds one gets the scale NaN, so that all of it is NaN on every rank: checks and loss scalers see it.

Source: scales that travel with their blocks, sums in fp32 and one rounding as in ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LARGEST = 127  # of a code; -128 is not used, so that codes are symmetric
LEAST = 1e-36  # a block of smaller numbers is zero: their scale would not be a normal number


class Codec(Protocol):
    """How numbers are written in a message.

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

    def encode(self, values: Tensor, row: Tensor) -> None:
        """Write ``values``, shape ``(n,)``, floating, into ``row``, shape ``(m,)``."""

    def decode(self, row: Tensor, out: Tensor) -> None:
        """Read ``row``, shape ``(m,)``, into ``out``, shape ``(n,)``, floating."""


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
        self.name = "bf16" if dtype == torch.bfloat16 else "fp16"

    def message(self, rows: int, n: int) -> Tensor:
        """As the protocol's."""
        return torch.empty(rows, n, dtype=self.dtype, device="meta")

    def encode(self, values: Tensor, row: Tensor) -> None:
        """As the protocol's."""
        row.copy_(values)

    def decode(self, row: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        out.copy_(row)


class Int8:
    """Eight bits a number; a row is ``[codes | one fp32 scale a block]``.

    Args:
        block: Numbers that share a scale; a power of two, at least 16.
    """

    name = "int8"

    def __init__(self, block: int = 256) -> None:
        self.block = block
        self.ratio = (1 + 4 / block) / 4
        self._scratch = torch.empty(
            0
        )  # fresh memory for each row would cost more than the arithmetic

    def message(self, rows: int, n: int) -> Tensor:
        """As the protocol's."""
        return torch.empty(rows, n + 4 * (n // self.block), dtype=torch.uint8, device="meta")

    def encode(self, values: Tensor, row: Tensor) -> None:
        """As the protocol's. Rounds to nearest."""
        n = values.numel()
        blocks = values.float().view(-1, self.block)
        largest = torch.maximum(blocks.amax(1), blocks.amin(1).neg_())
        scales = row[n:].view(torch.float32)
        # Comparisons with NaN are false: what is not finite gets NaN, what is too small a scale of zero.
        scales.copy_(largest).div_(LARGEST)
        scales.masked_fill_(~torch.isfinite(largest), float("nan")).masked_fill_(largest < LEAST, 0)
        steps = (LARGEST / largest).masked_fill_(~(scales > 0), 0)
        if self._scratch.numel() < n or self._scratch.device != row.device:
            self._scratch = torch.empty(n, device=row.device)
        codes = torch.mul(
            blocks, steps.unsqueeze(1), out=self._scratch[:n].view_as(blocks)
        ).round_()
        row[:n].view(torch.int8).view_as(codes).copy_(codes)

    def decode(self, row: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        n = out.numel()
        codes = row[:n].view(torch.int8)
        scales = row[n:].view(torch.float32)
        values = out if out.dtype == torch.float32 else torch.empty(n, device=out.device)
        values.copy_(codes)
        values.view(-1, self.block).mul_(scales.unsqueeze(1))
        if values is not out:
            out.copy_(values)


def add_rows(rows: Tensor, out: Tensor, codec: Codec | None = None) -> None:
    """Put the sum of ``rows``, shape ``(K, m)``, into ``out``, shape ``(n,)``, in the order of rows.

    Numbers of half precision and codes are added in fp32; the sum is rounded once.

    Args:
        rows: One a rank.
        out: Floating.
        codec: How rows are written; ``None`` if they are numbers of ``out``'s dtype.
    """
    if codec is None and out.dtype not in HALF:
        out.copy_(rows[0])
        for row in rows[1:]:
            out.add_(row)
        return
    wide = out.dtype == torch.float32
    total = out if wide else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    term = torch.empty_like(total)
    for position, row in enumerate(rows):
        into = total if position == 0 else term
        codec.decode(row, into) if codec is not None else into.copy_(row)
        if position:
            total.add_(term)
    if not wide:
        out.copy_(total)
