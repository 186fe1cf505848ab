"""The batches of one rank in evaluation and prediction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

from lightning_dp.data.loader import Agree, LoaderParts, Shard, ShardedBatchSampler
from lightning_dp.data.order import Order, OrderKey
from lightning_dp.data.shard import EvalPlan, even_tail
from lightning_dp.data.share import Share


class EvalBatches(ShardedBatchSampler):
    """Each unit exactly once, and the same number of steps on all ranks where that is possible.

    Args:
        parts: What the user's loader is made of.
        shard: This rank.
        epoch: Which order to begin with.
        idle_repeats: See :class:`EvalPlan`. False for prediction: idle ranks have nothing to do.
        agree: See :class:`ShardedBatchSampler`.

    Collective: creation and each ``iter()`` may compare orders across ranks (``agree``).
    """

    def __init__(
        self,
        parts: LoaderParts,
        shard: Shard,
        *,
        epoch: int = 0,
        idle_repeats: bool = True,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(parts, shard, agree)
        self._idle_repeats = idle_repeats
        self._epoch: int | None = None
        self.sampler.set_epoch(epoch)
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
        self._share = Share(order, self.plan.positions(self.shard.rank))
        self._count = self.plan.batches(self.shard.rank)
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
        last = order.read(kept, total)
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
        self._share = Share(order, range(rank, kept, world_size), mine)
        self._count = len(self._share)

    def __len__(self) -> int:
        # A rank without data says 1: Lightning then runs its hooks there too, and finds no batch.
        return max(self._count, int(self._is_prediction and self.total > 0))

    @property
    def num_units(self) -> int:
        """How many units this rank gets."""
        return len(self._share)

    def __iter__(self) -> Iterator[list[Any]]:
        self._open()
        self.seed_workers(OrderKey(self.shard.seed, self.sampler.epoch), 0)
        return self.local_batches()

    def local_batches(self, limit: int | None = None) -> Iterator[list[Any]]:
        """Yield this rank's batches of the current order (at most ``limit``)."""
        whole = self.parts.source.batches
        sizes = repeat(1, self._count) if whole else self.plan.sizes(self.shard.rank)
        return islice(self.batches_of(self._share, sizes), limit)
