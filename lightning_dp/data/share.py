"""One rank's part of an order, and how far a pass of it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dp.data.order import Order


@dataclass(frozen=True)
class Cursor:
    """How far a loader has come: the whole data state of one loader.

    Attributes:
        epoch: Counted from 0.
        pass_index: How often the loader was exhausted in the epoch.
        consumed: Units of the pass that all ranks together have trained.
    """

    epoch: int = 0
    pass_index: int = 0
    consumed: int = 0


class Share:
    """The units of one rank: those inside the order, and those taken again from its head.

    Args:
        order: All ranks' units.
        positions: This rank's; those from ``len(order)`` on mean its head.
        more: Units that follow.
    """

    def __init__(self, order: Order, positions: range, more: Sequence[Any] = ()) -> None:
        total = len(order)
        inside = positions[: len(range(positions.start, total, positions.step))]
        self._inside = len(inside)
        self._part = order.part(inside)
        heads = [position % total for position in positions[self._inside :]]
        self._again = [*(order.read(head, head + 1)[0] for head in heads), *more]

    def __len__(self) -> int:
        return self._inside + len(self._again)

    def read(self, start: int, stop: int) -> list[Any]:
        """Return the units ``start`` to ``stop - 1`` of this share."""
        if stop <= self._inside:
            return self._part.read(start, stop)
        units = self._part.read(start, self._inside) if start < self._inside else []
        return units + self._again[max(0, start - self._inside) : stop - self._inside]
