"""The batches of one rank, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_dp.data.loader import Agree, LoaderParts, Shard, ShardedBatchSampler
from lightning_dp.data.order import Order, OrderKey
from lightning_dp.data.shard import EvalPlan, TrainPlan, even_tail


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


class _Share:
    """The units of one rank: those inside the order, and those taken again from its head."""

    def __init__(self, order: Order, positions: range) -> None:
        total = len(order)
        inside = positions[: len(range(positions.start, total, positions.step))]
        self._inside = len(inside)
        self._block = order.block(inside)
        self._again = [
            order.block(range(place % total, place % total + 1)).read(0, 1)[0]
            for place in positions[self._inside :]
        ]

    def read(self, start: int, stop: int) -> list[Any]:
        if stop <= self._inside:
            return self._block.read(start, stop)
        units = self._block.read(start, self._inside) if start < self._inside else []
        return units + self._again[max(0, start - self._inside) : stop - self._inside]


class TrainBatches(ShardedBatchSampler):
    """Equal steps on all ranks, from a cursor on.

    Args:
        parts: What the user's loader is made of.
        shard: This rank's place.
        start: Where the first pass begins.
        progress: Returns how many batches of the running epoch were begun, or ``None`` as long as
            nothing was trained since this loader was made. Tells a new pass from one asked for twice.
        agree: See :class:`ShardedBatchSampler`.

    Collective: creation and each ``iter()`` may compare orders across ranks (``agree``).
    """

    def __init__(
        self,
        parts: LoaderParts,
        shard: Shard,
        start: Cursor | None = None,
        progress: Callable[[], int | None] = lambda: None,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(parts, shard, agree)
        self.start = start or Cursor()
        self._progress = progress
        self.sampler.set_epoch(self.start.epoch)
        self._open(self.start)

    def _open(self, cursor: Cursor) -> None:
        """Draw the order of a pass and keep this rank's part of it."""
        key = OrderKey(self.shard.seed, cursor.epoch, cursor.pass_index)
        order = self.draw(key)
        self.order_hash = order.fingerprint()
        self.total = len(order)
        consumed = min(cursor.consumed, self.total)
        self.plan = self._plan(consumed)
        self._share = _Share(order, self.plan.positions(self.shard.rank))
        self._cursor = cursor

    def _plan(self, consumed: int) -> TrainPlan:
        return TrainPlan(
            self.total, self.shard.world_size, self.batch_size, self.drop_last, consumed
        )

    @property
    def num_units(self) -> int:
        """How many units this rank gets in what the current pass still holds."""
        return len(self.plan.positions(self.shard.rank))

    def __len__(self) -> int:
        """Batches in a whole pass: a resumed pass is shorter, but its batches count from the middle on."""
        return self._plan(0).whole_batches

    @property
    def first_batch(self) -> int:
        """The number, within its epoch, of the first batch after :attr:`start`."""
        return self._plan(min(self.start.consumed, self.total)).first_batch

    def cursor_after(self, epoch: int, batches: int) -> Cursor:
        """Return the cursor when ``batches`` batches of ``epoch`` are trained, those before a resume included."""
        start = self.start if epoch == self.start.epoch else Cursor(epoch)
        plan = self._plan(min(start.consumed, self.total))
        since = batches - plan.first_batch
        if since < max(1, plan.batches):
            return Cursor(epoch, start.pass_index, plan.consumed_after(max(0, since)))
        whole = self._plan(0)
        later = since - plan.batches
        passes, rest = divmod(later, max(1, whole.whole_batches))
        return Cursor(epoch, start.pass_index + 1 + passes, whole.consumed_after(rest))

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator itself: the order must be drawn and the workers seeded when iter() is called.
        cursor = self._next_pass()
        if cursor != self._cursor:
            self._open(cursor)
        self.seed_workers(
            OrderKey(self.shard.seed, cursor.epoch, cursor.pass_index), cursor.consumed
        )
        return self._batches(self._share, self.num_units)

    def _next_pass(self) -> Cursor:
        epoch = self.sampler.epoch
        started = self._progress()
        first = self.start if epoch == self.start.epoch else Cursor(epoch)
        if not started or started <= self._plan(min(first.consumed, self.total)).first_batch:
            return first
        return self.cursor_after(epoch, started)

    def _batches(self, share: _Share, count: int) -> Iterator[list[Any]]:
        whole_batches = self.parts.source.batches
        for start in range(0, count, self.batch_size):
            units = share.read(start, min(start + self.batch_size, count))
            yield units[0] if whole_batches else units


class EvalBatches(ShardedBatchSampler):
    """Each unit exactly once, and the same number of steps on all ranks where that is possible.

    Args:
        parts: What the user's loader is made of.
        shard: This rank's place.
        idle_repeats: See :class:`EvalPlan`. False for prediction: idle ranks have nothing to do.
        agree: See :class:`ShardedBatchSampler`.

    Collective: creation and each ``iter()`` may compare orders across ranks (``agree``).
    """

    def __init__(
        self,
        parts: LoaderParts,
        shard: Shard,
        *,
        idle_repeats: bool = True,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(parts, shard, agree)
        self._idle_repeats = idle_repeats
        self._epoch: int | None = None
        self._open()

    def _open(self) -> None:
        epoch = self.sampler.epoch
        if epoch == self._epoch:
            return
        order = self.draw(OrderKey(self.shard.seed, epoch), replay=False)
        self._epoch = epoch
        self.total = len(order)
        if self.parts.source.batches:
            self._deal_batches(order)
            return
        if self.drop_last and not self._is_prediction:
            # What one device leaves out: the units that do not fill a batch of the user's size.
            self.total -= self.total % self.parts.batch_size
        self.plan = EvalPlan(self.total, self.shard.world_size, self.batch_size, self._idle_repeats)
        self._share = _Share(order, self.plan.positions(self.shard.rank))
        self.is_even, self.is_exact = self.plan.is_even, self.plan.is_exact
        self.is_ragged = self.plan.is_ragged

    @property
    def _is_prediction(self) -> bool:
        return not self._idle_repeats

    def _deal_batches(self, order: Order) -> None:
        """Deal a user's batches: whole rounds one to each rank, the last ones split over all ranks."""
        world_size, rank = self.shard.world_size, self.shard.rank
        total = len(order)
        rounds, rest = divmod(total, world_size)
        self.is_even = self.is_exact = True
        self.is_ragged = True  # batches may have any length
        kept = max(0, rounds - 1) * world_size
        last = order.block(range(kept, total)).read(0, total - kept)
        full, tail = last[: len(last) - rest], last[len(last) - rest :]
        if rest and (even := even_tail(full, tail, world_size)) is not None:
            full, tail = even
        elif rest and not full and self._idle_repeats:
            tail = [
                tail[each] if each < rest else tail[each % rest][:1] for each in range(world_size)
            ]
            self.is_exact = False
        elif rest:
            self.is_even = False
        mine = full[rank : rank + 1] + tail[rank : rank + 1]
        self._own = order.block(range(rank, kept, world_size))
        self._own_count = len(range(rank, kept, world_size))
        self._own_last = mine

    def __len__(self) -> int:
        # A rank without data says 1: Lightning then runs its hooks there too, and finds no batch.
        return (
            max(self._num_batches, 1) if self._is_prediction and self.total else self._num_batches
        )

    @property
    def _num_batches(self) -> int:
        if self.parts.source.batches:
            return self._own_count + len(self._own_last)
        return self.plan.batches(self.shard.rank)

    @property
    def num_units(self) -> int:
        """How many units this rank gets."""
        if self.parts.source.batches:
            return self._num_batches
        return len(self.plan.positions(self.shard.rank))

    def __iter__(self) -> Iterator[list[Any]]:
        self._open()
        self.seed_workers(OrderKey(self.shard.seed, self.sampler.epoch), 0)
        return self.local_batches()

    def local_batches(self, limit: int | None = None) -> Iterator[list[Any]]:
        """Yield this rank's batches of the current order (at most ``limit``)."""
        return islice(self._batches(), limit)

    def _batches(self) -> Iterator[list[Any]]:
        if self.parts.source.batches:
            for place in range(self._own_count):
                yield self._own.read(place, place + 1)[0]
            yield from self._own_last
            return
        start = 0
        for size in self.plan.sizes(self.shard.rank):
            yield self._share.read(start, start + size)
            start += size
