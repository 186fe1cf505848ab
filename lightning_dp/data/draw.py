"""Drawing an epoch's order from what the user gave: a sampler or a batch sampler of any kind.

A user's sampler is not taken apart. It is run once per epoch, on every rank, under random number
generators seeded by (seed, epoch, pass), so that all ranks see the same order and a later run can
see it again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_dp.data.feistel import FeistelOrder
from lightning_dp.data.order import (
    Order,
    OrderKey,
    SequentialOrder,
    TensorOrder,
    collect,
    collect_batches,
    mix,
)

RANDPERM_LIMIT = 1 << 26
"""Up to this many samples a shuffle is ``torch.randperm``, so that it equals DistributedSampler's."""

# Nothing in these changes from one epoch to the next, so an epoch can be drawn without those before.
_STATELESS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def permutation(total: int, key: OrderKey) -> Order:
    """Return a shuffle of ``range(total)``.

    Up to :data:`RANDPERM_LIMIT` it is the one of ``DistributedSampler(seed=seed)`` at the same epoch.
    Above, it is computed where it is read and costs neither time nor memory beforehand.
    """
    if total > RANDPERM_LIMIT:
        return FeistelOrder(total, mix(key.seed, key.epoch, key.pass_index))
    generator = torch.Generator().manual_seed(key.torch_seed)
    # The permutation does not depend on the dtype; 32 bits halve the memory.
    return TensorOrder(torch.randperm(total, generator=generator, dtype=torch.int32))


def sized(units: Any) -> int | None:
    """Return ``len(units)``, or ``None`` where there is none or it is not finite."""
    try:
        length = len(units)
    except (TypeError, NotImplementedError, OverflowError):
        return None
    return int(length)


def seed_everywhere(seed: int) -> None:
    """Seed torch's default CPU generator, Python's and numpy's (if it is loaded)."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mix(seed) & 0xFFFFFFFF)


class Source:
    """Where the units of an epoch come from.

    Args:
        units: The user's sampler, or batch sampler, or any iterable in their place.
        batches: Whether a unit is a whole batch of indices.

    Attributes:
        name: The class of ``units``, for messages.
    """

    def __init__(self, units: Iterable[Any], *, batches: bool = False) -> None:
        self.units = units
        self.batches = batches
        self.name = type(units).__name__
        self._drawn = 0

    @property
    def length(self) -> int | None:
        """How many units the user's object says it has; ``None`` if it does not say."""
        return sized(self.units)

    @property
    def is_pure(self) -> bool:
        """Whether the order is known without running user code: ranks cannot disagree about it."""
        return not self.batches and (
            type(self.units) is SequentialSampler or _is_plain_shuffle(self.units)
        )

    def draw(self, key: OrderKey, *, replay: bool = True) -> Order:
        """Return all units of the pass ``key``.

        Args:
            key: Which pass of which epoch.
            replay: Run a sampler that may change from epoch to epoch for the epochs before ``key`` too,
                if it has not run yet: so a resumed run sees what an uninterrupted one does.
        """
        if self.is_pure:
            total = sized(self.units) or 0
            if type(self.units) is SequentialSampler:
                return SequentialOrder(range(total))
            return permutation(total, key)
        if replay and self._drawn == 0 and self._changes_by_itself():
            for epoch in range(key.epoch):
                with self._seeded(OrderKey(key.seed, epoch)):
                    for _ in islice(self.units, self.length):
                        pass
        self._drawn += 1
        gather = collect_batches if self.batches else collect
        with self._seeded(key):
            # Not more than it promised: some never end, and Lightning would stop at the length anyway.
            return gather(islice(self.units, self.length))

    def stream(self, key: OrderKey) -> Iterator[Any]:
        """Yield the units of the pass ``key`` one by one, without knowing how many there are.

        The generators are exchanged around each unit, so that training between two units does not
        disturb the order, nor the order training.
        """
        states = self._random_states()
        states.seed(key)
        iterator = iter(self.units)
        states.swap()
        while True:
            states.swap()
            try:
                unit = next(iterator)
            except StopIteration:
                return
            finally:
                states.swap()
            yield unit

    def _changes_by_itself(self) -> bool:
        chain = [self.units, getattr(self.units, "sampler", None)]
        if any(callable(getattr(each, "set_epoch", None)) for each in chain):
            return False
        return not all(
            each is None or type(each) in (*_STATELESS, BatchSampler) or isinstance(each, Sequence)
            for each in chain
        )

    def _random_states(self) -> _RandomStates:
        chain = (self.units, getattr(self.units, "sampler", None))
        found = [getattr(each, "generator", None) for each in chain]
        return _RandomStates([each for each in found if isinstance(each, torch.Generator)])

    @contextmanager
    def _seeded(self, key: OrderKey) -> Iterator[None]:
        states = self._random_states()
        states.seed(key)
        try:
            yield
        finally:
            states.swap()


def _is_plain_shuffle(units: Any) -> bool:
    return (
        type(units) is RandomSampler
        and not units.replacement
        and units.generator is None
        and units.num_samples == len(units.data_source)
    )


class _RandomStates:
    """The states of all random number generators that a sampler may use, kept aside and put back."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = list({id(each): each for each in generators}.values())
        self._aside = self._read()

    def seed(self, key: OrderKey) -> None:
        seed_everywhere(key.torch_seed)
        for generator in self._generators:
            # The user's own seed still decides, but each epoch can be drawn without those before.
            generator.manual_seed(mix(generator.initial_seed(), key.epoch, key.pass_index))

    def swap(self) -> None:
        """Exchange the states in force with those kept aside."""
        current = self._read()
        for write, state in self._aside:
            write(state)
        self._aside = current

    def _read(self) -> list[tuple[Callable[[Any], Any], Any]]:
        default = torch.default_generator
        pairs: list[tuple[Callable[[Any], Any], Any]] = [
            (default.set_state, default.get_state()),
            (random.setstate, random.getstate()),
        ]
        if (numpy := sys.modules.get("numpy")) is not None:
            pairs.append((numpy.random.set_state, numpy.random.get_state()))
        pairs += [(each.set_state, each.get_state()) for each in self._generators]
        return pairs
