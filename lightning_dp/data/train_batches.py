"""The batches of one rank in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

from lightning_dp.data.loader import Agree, LoaderParts, Shard, ShardedBatchSampler
from lightning_dp.data.order import OrderKey
from lightning_dp.data.shard import TrainPlan
from lightning_dp.data.share import Cursor, Share


class TrainBatches(ShardedBatchSampler):
    """Equal steps on all ranks, from a cursor on.

    Args:
        parts: What the user's loader is made of.
        shard: This rank.
        start: Where the first pass begins.
        begun: Returns how many batches of the running epoch were begun, since ``start`` in its epoch.
            Tells a new pass from one asked for twice.
        agree: See :class:`ShardedBatchSampler`.

    Collective: creation and each ``iter()`` may compare orders across ranks (``agree``).
    """

    def __init__(
        self,
        parts: LoaderParts,
        shard: Shard,
        start: Cursor | None = None,
        begun: Callable[[], int] = lambda: 0,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(parts, shard, agree)
        self.start = start or Cursor()
        self._begun = begun
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
        self._share = Share(order, self.plan.positions(self.shard.rank))
        self._cursor = cursor

    def _plan(self, consumed: int) -> TrainPlan:
        return TrainPlan(
            self.total, self.shard.world_size, self.batch_size, self.drop_last, consumed
        )

    @property
    def num_units(self) -> int:
        """How many units this rank gets in what the current pass still holds."""
        return len(self._share)

    def __len__(self) -> int:
        """Batches in a whole pass: a resumed pass is shorter, but its batches count from the middle on."""
        return self._plan(0).whole_batches

    @property
    def first_batch(self) -> int:
        """The number, within its epoch, of the first batch after :attr:`start`."""
        return self._plan(min(self.start.consumed, self.total)).first_batch

    def cursor_after(self, epoch: int, batches: int) -> Cursor:
        """Return the cursor after ``batches`` batches of ``epoch``, since ``start`` in its epoch."""
        start = self.start if epoch == self.start.epoch else Cursor(epoch)
        plan = self._plan(min(start.consumed, self.total))
        if batches < max(1, plan.batches):
            return Cursor(epoch, start.pass_index, plan.consumed_after(max(0, batches)))
        whole = self._plan(0)
        passes, rest = divmod(batches - plan.batches, max(1, whole.whole_batches))
        return Cursor(epoch, start.pass_index + 1 + passes, whole.consumed_after(rest))

    def hash_of(self, cursor: Cursor) -> int:
        """Return the hash of the order of ``cursor``'s pass; 0 if that pass was not drawn."""
        drawn = self._cursor
        same = (drawn.epoch, drawn.pass_index) == (cursor.epoch, cursor.pass_index)
        return self.order_hash if same else 0

    def local_batches(self, limit: int | None = None) -> Iterator[list[Any]]:
        """Yield this rank's batches of the current pass (at most ``limit``)."""
        return islice(self._batches(), limit)

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator itself: the order must be drawn and the workers seeded when iter() is called.
        cursor = self._start_of_pass()
        if cursor != self._cursor:
            self._open(cursor)
        self.seed_workers(
            OrderKey(self.shard.seed, cursor.epoch, cursor.pass_index), cursor.consumed
        )
        return self._batches()

    def _start_of_pass(self) -> Cursor:
        epoch, begun = self.sampler.epoch, self._begun()
        if begun > 0:
            return self.cursor_after(epoch, begun)
        return self.start if epoch == self.start.epoch else Cursor(epoch)

    def _batches(self) -> Iterator[list[Any]]:
        return self.batches_of(self._share, repeat(self.batch_size, self.plan.batches))
