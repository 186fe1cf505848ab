"""Sharing a sampler that does not say how many units it yields, or never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning_dp.data.loader import LoaderParts, Shard, ShardedBatchSampler
from lightning_dp.data.order import OrderKey
from lightning_dp.data.share import Cursor


class StreamBatches(ShardedBatchSampler):
    """Every rank runs the user's sampler, under the same seeds, and takes its part of each round.

    A round is one batch for each rank. In training a last round that is not full is cut to equal parts,
    so that all ranks make the same number of steps; in evaluation it is dealt out as far as it goes.

    Args:
        parts: What the user's loader is made of.
        shard: This rank.
        start: Where the first pass begins; units before it are drawn and dropped, never loaded.
        begun: See :class:`TrainBatches`.
        training: Whether ranks must make equal steps.
    """

    def __init__(
        self,
        parts: LoaderParts,
        shard: Shard,
        start: Cursor | None = None,
        begun: Callable[[], int] = lambda: 0,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(parts, shard)
        self.start = start or Cursor()
        self.sampler.set_epoch(self.start.epoch)
        self._begun = begun
        self._training = training
        self.is_ragged = not training

    def cursor_after(self, epoch: int, batches: int) -> Cursor:
        """Return the cursor after ``batches`` batches of ``epoch``, since ``start`` in its epoch."""
        consumed = self.start.consumed if epoch == self.start.epoch else 0
        return Cursor(epoch, 0, consumed + max(0, batches) * self._round)

    @property
    def first_batch(self) -> int:
        """The number, within its epoch, of the first batch after :attr:`start`."""
        return -(-self.start.consumed // self._round)

    @property
    def _round(self) -> int:
        return self.batch_size * self.shard.world_size

    def __iter__(self) -> Iterator[list[Any]]:
        epoch = self.sampler.epoch
        again = self._begun() > 0
        consumed = self.start.consumed if epoch == self.start.epoch and not again else 0
        key = OrderKey(self.shard.seed, epoch)
        self.seed_workers(key, consumed)
        return self._batches(islice(self.parts.source.stream(key), consumed, None))

    def _batches(self, units: Iterator[Any]) -> Iterator[list[Any]]:
        rank, world_size = self.shard.rank, self.shard.world_size
        while True:
            members = list(islice(units, self._round))
            if len(members) < self._round and self._training:
                keep = 0 if self.drop_last else len(members) - len(members) % world_size
                members = members[:keep]
            mine = members[rank::world_size]
            if not mine:
                return
            yield mine[0] if self.parts.source.batches else mine
