"""Which rank gets which units of an order, in batches: integers only.

Units are samples, or whole batches where the user's batch sampler makes them (then ``batch_size`` is 1).
Position ``p`` of the order belongs to rank ``p % world_size``, as in torch's DistributedSampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Unit = TypeVar("Unit")


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


@dataclass(frozen=True)
class TrainPlan:
    """A pass for training: every rank takes the same number of equal steps.

    The tail is filled up from the head of the same order to a multiple of ``world_size`` (at most
    ``world_size - 1`` repeated units), or with ``drop_last`` cut to whole global batches.

    Attributes:
        total: Units in the whole pass.
        world_size: Number of ranks.
        batch_size: Units in a batch of one rank.
        drop_last: Leave out the tail that does not fill a batch on every rank.
        consumed: Units of the pass that were trained before, on any number of ranks.
    """

    total: int
    world_size: int
    batch_size: int
    drop_last: bool = False
    consumed: int = 0

    @property
    def whole_batches(self) -> int:
        """Batches of a rank in the whole pass."""
        return self._batches(self.total)

    @property
    def batches(self) -> int:
        """Batches of a rank in what is left of the pass."""
        return self._batches(self.total - self.consumed)

    @property
    def first_batch(self) -> int:
        """The number of the first batch: batches are counted as in the whole pass, to its end."""
        return self.whole_batches - self.batches

    def positions(self, rank: int) -> range:
        """Return the positions that ``rank`` gets; those from ``total`` on mean the head of the order."""
        left = self.total - self.consumed
        count = _ceil(left, self.world_size)
        if self.drop_last:
            count = self.batches * self.batch_size
        first = self.consumed + rank
        return range(first, first + count * self.world_size, self.world_size)

    def consumed_after(self, batches: int) -> int:
        """Return how many units of the pass are trained when every rank has done ``batches`` more."""
        return min(self.total, self.consumed + batches * self.batch_size * self.world_size)

    def _batches(self, units: int) -> int:
        if self.drop_last:
            return units // (self.world_size * self.batch_size)
        return _ceil(_ceil(units, self.world_size), self.batch_size)


@dataclass(frozen=True)
class EvalPlan:
    """A pass for evaluation or prediction: each unit exactly once.

    All ranks take the same number of batches wherever that is possible (``total >= world_size`` and
    ``batch_size >= 2``): a rank with fewer units makes its last batches smaller.

    Attributes:
        total: Units in the pass.
        world_size: Number of ranks.
        batch_size: The most units in a batch of one rank.
        idle_repeats: Give a rank without any unit one that another rank has too, so that it makes one
            step: needed where metrics are reduced afterwards, for which every rank must have made one.
    """

    total: int
    world_size: int
    batch_size: int
    idle_repeats: bool = False

    @property
    def most_batches(self) -> int:
        """Batches of the rank with most units."""
        return _ceil(_ceil(self.total, self.world_size), self.batch_size)

    @property
    def is_exact(self) -> bool:
        """Whether no unit is repeated."""
        return not (self.idle_repeats and 0 < self.total < self.world_size)

    @property
    def is_even(self) -> bool:
        """Whether all ranks make the same number of steps."""
        return len({self.batches(rank) for rank in (0, self.world_size - 1)}) == 1

    @property
    def is_ragged(self) -> bool:
        """Whether ranks hold different numbers of units."""
        return self.total % self.world_size != 0

    def positions(self, rank: int) -> range:
        """Return the positions that ``rank`` gets."""
        if self.idle_repeats and rank >= self.total > 0:
            return range(rank % self.total, rank % self.total + 1)
        return range(rank, self.total, self.world_size)

    def batches(self, rank: int) -> int:
        """Return how many batches ``rank`` makes."""
        return min(self.most_batches, len(self.positions(rank)))

    def sizes(self, rank: int) -> Iterator[int]:
        """Yield the sizes of the batches of ``rank``."""
        left = len(self.positions(rank))
        for after in reversed(range(self.batches(rank))):
            size = min(self.batch_size, left - after)  # leave one unit for each batch that follows
            yield size
            left -= size


def even_tail(
    previous: Sequence[list[Unit]], tail: Sequence[list[Unit]], world_size: int
) -> tuple[list[list[Unit]], list[list[Unit]]] | None:
    """Split the batches that do not fill a round over all ranks, so that each rank gets one.

    Args:
        previous: The last whole round, one batch for each rank; empty if there is none.
        tail: The batches after it, fewer than ``world_size``.
        world_size: Number of ranks.

    Returns:
        Both rounds with one non-empty batch for each rank and the same units, no batch longer than
        before; ``None`` if there are too few units for that.
    """
    units = [unit for batch in tail for unit in batch]
    donors = [list(batch) for batch in previous]
    while len(units) < world_size:
        donor = max(donors, key=len, default=[])
        if len(donor) < 2:
            return None
        units.append(donor.pop())
    bounds = [len(units) * rank // world_size for rank in range(world_size + 1)]
    return donors, [units[bounds[rank] : bounds[rank + 1]] for rank in range(world_size)]
