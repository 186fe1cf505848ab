"""Parts of an optimizer's state on their way to a folder, and from there: see ``folder.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Reads(Protocol):
    """Where parts can be read."""

    def values(self, label: str, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        """Elements ``begin`` to ``end`` of a flat tensor."""


@dataclass(frozen=True)
class Entry:
    """What one rank keeps for one parameter.

    Attributes:
        label: Names optimizer and parameter; the same on all ranks.
        begin: The first element of this rank's range.
        numel: Elements of the parameter.
        ranges: Flat tensors of the range, by key.
        described: For the rank that writes it: shape, strides and keys of the whole; otherwise ``None``.
    """

    label: str
    begin: int
    numel: int
    ranges: Mapping[str, Tensor]
    described: Mapping[str, Any] | None


@dataclass(frozen=True)
class Stored:
    """A tensor of a state that is still on disk.

    Attributes:
        folder: Where.
        label: Its name there.
        dtype: Its type.
        shape: As its parameter had, with ``strides``.
    """

    folder: Reads
    label: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def part(self, begin: int, end: int) -> Tensor:
        """Read a range of its memory, flat. Local."""
        return self.folder.values(self.label, self.dtype, begin, end)

    def whole(self) -> Tensor:
        """Read all of it. Local."""
        return self.part(0, self.shape.numel()).as_strided(self.shape, self.strides)
