"""Give a user's DataLoader our batch sampler, without re-creating the loader.

The loader is copied shallowly and three entries of the copy are replaced. No constructor is called, so
subclasses with any arguments work, and the user's object stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lightning_dp.data.draw import Source
from lightning_dp.data.order import Order, OrderKey, mix
from lightning_dp.data.share import Share

Agree = Callable[[Order, str], Order]
"""Makes all ranks hold one order: gets the local one and the sampler's name, returns the one to use.

Collective: called on every rank, in the same order, when a pass begins.
"""


@dataclass(frozen=True)
class Shard:
    """A rank among those that share the data.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: Number of ranks.
        seed: The run's seed for orders, the same on all ranks.
    """

    rank: int
    world_size: int
    seed: int


class RankSampler(DistributedSampler[Any]):
    """Stands where tools look for a DistributedSampler; the batch sampler that owns it does the work.

    Args:
        owner: Makes the batches.
        dataset: The loader's dataset.
        shard: This rank.
        epoch_targets: The user's objects that have a ``set_epoch`` of their own.
    """

    def __init__(
        self,
        owner: ShardedBatchSampler,
        dataset: Any,
        shard: Shard,
        epoch_targets: Iterable[Any] = (),
    ) -> None:
        # Not DistributedSampler's constructor: it takes the length of a dataset, which may have none.
        self.owner = owner
        self.dataset = dataset
        self.num_replicas = shard.world_size
        self.rank = shard.rank
        self.seed = shard.seed
        self.epoch = 0
        self.shuffle = False  # whether there is one is decided in the user's sampler
        self.drop_last = owner.drop_last
        self._epoch_targets = list(epoch_targets)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, here and in the user's sampler, batch sampler and dataset where they have it."""
        self.epoch = epoch
        for target in self._epoch_targets:
            target.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(iter(self.owner))

    def __len__(self) -> int:
        if self.owner.parts.loader.batch_sampler is None:  # the loader takes its length from here
            return len(self.owner)
        return self.owner.num_units


class ShardedBatchSampler(Sampler[Any]):
    """What all our batch samplers share: the epoch, the drawing of orders, the seed of the workers.

    Args:
        parts: What the user's loader is made of.
        shard: This rank.
        agree: Compares a drawn order across ranks; ``None`` trusts this rank's.

    Attributes:
        is_even: Whether all ranks make the same number of steps, as far as anybody knows.
        is_exact: Whether no rank without units of its own repeats one of another's.
        is_ragged: Whether ranks may hold different numbers of units.
    """

    is_even = is_exact = True
    is_ragged = False

    def __init__(self, parts: LoaderParts, shard: Shard, agree: Agree | None = None) -> None:
        self.parts = parts
        self.shard = shard
        self.batch_size = parts.batch_size
        self.drop_last = parts.drop_last
        self.generator: torch.Generator | None = None
        self.sampler = RankSampler(self, parts.loader.dataset, shard, parts.epoch_targets)
        self._agree = agree

    def __len__(self) -> int:
        """How many batches a pass has on this rank."""
        raise TypeError(f"{self.parts.source.name} does not say how many units it yields")

    @property
    def num_units(self) -> int:
        """How many units this rank gets in a pass."""
        return len(self) * self.batch_size

    def draw(self, key: OrderKey, *, replay: bool = True) -> Order:
        """Return the order of a pass, the same on every rank.

        Collective: every rank, in the same order, unless the order is computed without user code.
        """
        order = self.parts.source.draw(key, replay=replay)
        if self._agree is not None and not self.parts.source.is_pure:
            return self._agree(order, self.parts.source.name)
        return order

    def batches_of(self, share: Share, sizes: Iterable[int]) -> Iterator[list[Any]]:
        """Yield the batches of ``share``, which have these sizes."""
        start = 0
        for size in sizes:
            units = share.read(start, start + size)
            yield units[0] if self.parts.source.batches else units
            start += size

    def seed_workers(self, key: OrderKey, consumed: int) -> None:
        """Let the workers that start next draw numbers of their own on each rank, the same in each run."""
        if self.generator is not None:
            rank = self.shard.rank
            self.generator.manual_seed(mix(key.seed, key.epoch, key.pass_index, consumed, rank))


@dataclass(frozen=True)
class LoaderParts:
    """What a user's DataLoader is made of.

    Attributes:
        loader: The user's loader, untouched.
        source: Where its units come from.
        batch_size: Units in a batch of one rank.
        drop_last: As the user asked.
    """

    loader: DataLoader[Any]
    source: Source
    batch_size: int
    drop_last: bool

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderParts:
        """Look at ``loader``; one that we made before counts as the user's it was made from."""
        loader = original(loader)
        batch_sampler: Any = loader.batch_sampler
        if batch_sampler is None:  # the dataset, or the sampler, makes whole batches
            return cls(loader, Source(loader.sampler), 1, False)
        # Exactly torch's: a subclass decides itself what is in a batch.
        if type(batch_sampler) is BatchSampler:
            source = Source(batch_sampler.sampler)
            return cls(loader, source, batch_sampler.batch_size, batch_sampler.drop_last)
        drop_last = bool(getattr(batch_sampler, "drop_last", False))
        return cls(loader, Source(batch_sampler, batches=True), 1, drop_last)

    @property
    def epoch_targets(self) -> list[Any]:
        """The user's objects with a ``set_epoch``: dataset, batch sampler, and both samplers, once each.

        Not the dataset of a loader with a state of its own: that loader counts epochs, and its dataset
        may take another word for the beginning of a new one.
        """
        batch_sampler = self.loader.batch_sampler
        candidates = [
            None if is_stateful(self.loader) else self.loader.dataset,
            self.loader.sampler,
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ]
        found = {id(each): each for each in candidates}
        return [each for each in found.values() if callable(getattr(each, "set_epoch", None))]


def is_stateful(loader: Any) -> bool:
    """Whether the user's loader can say where it is, and go on from there."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(type(loader), name, None)) for name in names)


def original(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the user's loader that ``loader`` was made from, or ``loader`` itself."""
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, ShardedBatchSampler):
            return sampler.parts.loader
    if isinstance(loader.sampler, RankSampler):
        return loader.sampler.owner.parts.loader
    return loader


def is_sharded_by_user(loader: DataLoader[Any]) -> bool:
    """Whether the user put a DistributedSampler into the loader."""
    loader = original(loader)
    inner = getattr(loader.batch_sampler, "sampler", None)
    return isinstance(loader.sampler, DistributedSampler) or isinstance(inner, DistributedSampler)


def copy_loader(
    loader: DataLoader[Any], kind: type[Any] | None = None, **entries: Any
) -> DataLoader[Any]:
    """Return a shallow copy of ``loader`` with some attributes replaced, without calling a constructor.

    DataLoader refuses assignment to most of its attributes after construction, hence ``__dict__``.

    Args:
        loader: The user's.
        kind: The class of the copy, a subclass of the loader's; ``None`` keeps the class.
        entries: Attributes to replace.
    """
    copy: DataLoader[Any] = object.__new__(kind or type(loader))
    copy.__dict__.update(loader.__dict__)
    # The original keeps its persistent workers; sharing them would mix two orders.
    copy.__dict__["_iterator"] = None
    copy.__dict__.update(entries)
    return copy


def give_batches(batches: ShardedBatchSampler, wrap: Callable[[Any], Any] | None = None) -> Any:
    """Return a copy of the user's loader that yields the batches of ``batches``.

    Args:
        batches: Ours.
        wrap: Put around the batch sampler, to record indices.
    """
    loader = batches.parts.loader
    entries: dict[str, Any] = {"sampler": batches.sampler}
    if loader.batch_sampler is not None:
        entries["batch_sampler"] = wrap(batches) if wrap is not None else batches
        if loader.batch_size is not None:
            entries["batch_size"] = batches.batch_size
    if loader.generator is None:
        # Torch seeds all workers from it. Without one they are seeded alike on all ranks.
        batches.generator = entries["generator"] = torch.Generator()
    return copy_loader(loader, **entries)
