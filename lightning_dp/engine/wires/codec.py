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
SCRATCH_NUMBERS = 256 * 1024
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

    def encode(self, values: Tensor, rows: Tensor) -> None:
        """As the protocol's."""
        rows.copy_(values)

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        out.copy_(rows)


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

    def encode(self, values: Tensor, rows: Tensor) -> None:
        """As the protocol's. Rounds to nearest."""
        # Few rows at a time: scratch memory that a processor's cache holds.
        step = max(1, SCRATCH_NUMBERS // values.shape[1])
        for some, theirs in zip(values.split(step), rows.split(step), strict=True):  # type: ignore[no-untyped-call]
            self._encode(some, theirs)

    def _encode(self, values: Tensor, rows: Tensor) -> None:
        codes, scales = self._parts(rows, values.shape[1])
        blocks = values.view(codes.shape)
        largest = torch.maximum(blocks.amax(2), blocks.amin(2).neg_()).clamp_(min=LEAST)
        # The second term is NaN where the first is not finite, else 0.
        torch.add(largest / LARGEST, largest - largest, out=scales)
        if self._scratch.numel() < values.numel() or self._scratch.device != values.device:
            self._scratch = torch.empty(values.numel(), device=values.device)
        scaled = self._scratch[: values.numel()].view(codes.shape)
        codes.copy_(torch.mul(blocks, (LARGEST / largest).unsqueeze(2), out=scaled).round_())

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """As the protocol's."""
        codes, scales = self._parts(rows, out.shape[1])
        out.view(codes.shape).copy_(codes).mul_(scales.unsqueeze(2))

    def _parts(self, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return views: codes ``(k, blocks, block)``, scales ``(k, blocks)``."""
        codes = rows[:, :n].view(torch.int8).view(len(rows), -1, self.block)
        return codes, rows[:, n:].view(torch.float32)


def add_rows(rows: Tensor, out: Tensor, codec: Codec | None = None) -> None:
    """Put the sum of ``rows``, shape ``(K, m)``, into ``out``, shape ``(n,)``, in the order of rows.

    Numbers of half precision and codes are added in fp32; the sum is rounded once.

    Args:
        rows: One a rank.
        out: Floating; of fp32 with a codec.
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
    for position in range(len(rows)):
        row, into = rows[position : position + 1], total if position == 0 else term
        codec.decode(row, into.unsqueeze(0)) if codec is not None else into.copy_(row[0])
        if position:
            total.add_(term)
    if not wide:
        out.copy_(total)
