"""Data that only yields: shared item by item, and told which epoch it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from lightning_dp.data.content_hash import NOTHING
from lightning_dp.data.draw import sized
from lightning_dp.data.loader import copy_loader


@dataclass(eq=False, repr=False)
class ShardedIterable(IterableDataset[Any]):
    """Every ``world_size * workers``-th item of a dataset that yields all items everywhere.

    Item ``i`` goes to worker ``i % workers`` of rank ``i // workers`` within each group of
    ``world_size * workers`` items.

    Args:
        dataset: Yields the same items, in the same order, in every process.
        rank: This rank.
        world_size: Number of ranks.
        equal: Leave out the last group if it is not full, so that all ranks get equally much.
        length: What ``len()`` should say, so that a DataLoader's length comes out right.
    """

    dataset: Any
    rank: int
    world_size: int
    equal: bool
    length: int | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        parts, mine = self.world_size * workers, self.rank * workers + worker
        held = NOTHING
        for index, item in enumerate(self.dataset):
            place = index % parts
            if place == mine:
                held = item
            if place == parts - 1:
                yield held
                held = NOTHING
        if held is not NOTHING and not self.equal:
            yield held

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the dataset has no length")
        return self.length


def shard_iterable(
    loader: DataLoader[Any], rank: int, world_size: int, *, equal: bool
) -> DataLoader[Any]:
    """Return a copy of ``loader`` that yields this rank's part of its iterable dataset."""
    total = sized(loader.dataset)
    length = None
    if total is not None:
        workers, size = max(1, loader.num_workers), loader.batch_size or 1
        counts = [
            total // (world_size * workers)
            + (not equal and rank * workers + worker < total % (world_size * workers))
            for worker in range(workers)
        ]
        batches = sum(count // size if loader.drop_last else -(-count // size) for count in counts)
        length = batches * size  # a DataLoader divides by its batch size
    dataset = ShardedIterable(loader.dataset, rank, world_size, equal=equal, length=length)
    return copy_loader(loader, dataset=dataset)


class EpochSampler(Sampler[Any]):
    """Stands where Lightning looks for a ``set_epoch``, and tells the user's dataset.

    Args:
        inner: The loader's own sampler.
        targets: The user's objects with a ``set_epoch``.
    """

    def __init__(self, inner: Any, targets: Iterable[Any]) -> None:
        self._inner = inner
        self._targets = list(targets)

    def set_epoch(self, epoch: int) -> None:
        """Pass it on."""
        for target in self._targets:
            target.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)
