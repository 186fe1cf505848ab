"""Orders: a function of (seed, epoch, pass); the same numbers as torch's where torch has them."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_dp.data import draw as draw_module
from lightning_dp.data.draw import Source, permutation
from lightning_dp.data.feistel import FeistelOrder
from lightning_dp.data.order import (
    ListOrder,
    OrderKey,
    RaggedOrder,
    SequentialOrder,
    TensorOrder,
    collect,
    collect_batches,
    mix,
)


def listed(order):
    return order.read(0, len(order))


def test_mix_depends_on_every_part_and_their_order():
    values = {mix(a, b, c) for a in range(12) for b in range(12) for c in range(12)}
    assert len(values) == 12**3
    assert all(0 <= value < 2**63 for value in values)
    assert mix(-1) != mix(1)


@pytest.mark.parametrize("n", [1, 7, 1000, 70001])
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_shuffle_is_the_one_of_distributed_sampler(n, epoch):
    sampler = DistributedSampler(range(n), 1, 0, seed=11)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    assert listed(permutation(n, OrderKey(11, epoch))) == list(sampler)


def test_another_epoch_seed_or_pass_is_another_order():
    keys = [OrderKey(s, e, p) for s in (1, 100) for e in (0, 1) for p in (0, 1, 2)]
    orders = [tuple(listed(permutation(50, key))) for key in keys]
    assert len(set(orders)) == len(keys)
    assert all(sorted(order) == list(range(50)) for order in orders)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 65537])
def test_the_computed_shuffle_is_a_permutation(n):
    order = FeistelOrder(n, key=n)
    assert sorted(listed(order)) == list(range(n))
    part = order.part(range(1, n, 3))
    assert part.read(0, len(part)) == listed(order)[1::3]


def test_the_computed_shuffle_has_no_pattern():
    """Neighbours, low bits and places: as even as chance, within what 10**5 draws can show."""
    n = 100_000
    values = torch.tensor(listed(FeistelOrder(n, key=3)))
    places = torch.arange(n)
    for left, right in ((places * 50 // n, values * 50 // n), (places % 64, values % 64)):
        counts = torch.zeros(64, 64)
        counts.index_put_((left, right), torch.ones(n), accumulate=True)
        counts = counts[: int(left.max()) + 1, : int(right.max()) + 1]
        expected = n / counts.numel()
        degrees = (counts.shape[0] - 1) * (counts.shape[1] - 1)
        chi2 = float(((counts - expected) ** 2 / expected).sum()) / degrees
        assert 0.9 < chi2 < 1.1
    steps = Counter((values[1:] - values[:-1]).abs().tolist())
    assert steps[1] < 20  # about 2 by chance
    # the control: an order that only rotates has this difference everywhere
    assert Counter((places[1:] - places[:-1]).tolist())[1] == n - 1


def test_large_datasets_use_the_computed_shuffle(monkeypatch):
    assert isinstance(permutation(draw_module.RANDPERM_LIMIT + 1, OrderKey(0, 0)), FeistelOrder)
    monkeypatch.setattr(draw_module, "RANDPERM_LIMIT", 10)
    assert sorted(listed(permutation(11, OrderKey(0, 0)))) == list(range(11))
    assert isinstance(permutation(10, OrderKey(0, 0)), TensorOrder)


def test_integers_are_packed_and_anything_else_is_kept():
    packed = collect(iter([3, np.int64(4), torch.tensor(5)]))
    assert isinstance(packed, TensorOrder)
    assert listed(packed) == [3, 4, 5]
    assert listed(collect([])) == []
    mixed = collect([1, ("a", 2), 3])
    assert isinstance(mixed, ListOrder)
    assert listed(mixed) == [1, ("a", 2), 3]
    batches = collect_batches([[1, 2], (3,), torch.tensor([4, 5])])
    assert isinstance(batches, RaggedOrder)
    assert listed(batches) == [[1, 2], [3], [4, 5]]
    assert batches.part(range(0, 3, 2)).read(0, 2) == [[1, 2], [4, 5]]
    keyed = collect_batches([[1, 2], [7, "x"], [3]])
    assert listed(keyed) == [[1, 2], [7, "x"], [3]]
    assert listed(collect_batches([])) == []


def test_fingerprints_tell_orders_apart():
    orders = [
        SequentialOrder(range(4)),
        SequentialOrder(range(5)),
        collect([0, 1, 2, 3]),
        collect([0, 1, 3, 2]),
        collect(["a", "b"]),
        collect(["b", "a"]),
        collect_batches([[0, 1], [2]]),
        collect_batches([[0], [1, 2]]),
        FeistelOrder(5, 1),
        FeistelOrder(5, 2),
    ]
    prints = [order.fingerprint() for order in orders]
    assert len(set(prints)) == len(prints)
    assert all(0 <= value < 2**63 for value in prints)
    assert collect([0, 1, 2]).fingerprint() == collect([0, 1, 2]).fingerprint()


class Curriculum(Sampler):
    """Gets harder with each epoch, counting for itself."""

    def __init__(self):
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        return iter([self.calls * 10 + i for i in range(3)])

    def __len__(self):
        return 3


class ByEpoch(Sampler):
    def __init__(self):
        self.epochs, self.epoch = [], -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.epochs.append(self.epoch)
        return iter([self.epoch, random.random(), float(np.random.rand()), float(torch.rand(()))])

    def __len__(self):
        return 4


def test_a_sampler_runs_under_seeds_of_its_own_and_leaves_the_others_alone():
    weighted = Source(WeightedRandomSampler([1.0, 2.0, 3.0], 8))
    drawn = listed(weighted.draw(OrderKey(1, 0)))
    torch.manual_seed(123)
    random.seed(5)
    np.random.seed(6)
    expected = (float(torch.rand(())), random.random(), float(np.random.rand()))
    torch.manual_seed(123)
    random.seed(5)
    np.random.seed(6)
    assert listed(weighted.draw(OrderKey(1, 0))) == drawn
    assert listed(weighted.draw(OrderKey(1, 1))) != drawn
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == expected


def test_numpy_and_python_randomness_in_a_sampler_is_the_epochs():
    source = Source(ByEpoch())
    first = listed(source.draw(OrderKey(3, 0)))
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert listed(source.draw(OrderKey(3, 0))) == first
    assert listed(source.draw(OrderKey(3, 1)))[1:] != first[1:]


def test_a_samplers_own_generator_keeps_deciding_and_is_put_back():
    def draws(seed, epoch):
        generator = torch.Generator().manual_seed(seed)
        before = generator.get_state()
        order = listed(
            Source(RandomSampler(range(30), generator=generator)).draw(OrderKey(0, epoch))
        )
        assert torch.equal(generator.get_state(), before)
        assert generator.initial_seed() == seed
        return order

    assert draws(1, 0) == draws(1, 0)
    assert draws(1, 0) != draws(1, 1)
    assert draws(1, 0) != draws(2, 0)


def test_a_sampler_that_counts_for_itself_is_run_for_the_epochs_before():
    straight = Source(Curriculum())
    epochs = [listed(straight.draw(OrderKey(0, epoch))) for epoch in range(4)]
    resumed = Source(Curriculum())
    assert listed(resumed.draw(OrderKey(0, 3))) == epochs[3]
    assert (
        listed(Source(Curriculum()).draw(OrderKey(0, 3), replay=False)) == epochs[0]
    )  # the control


@pytest.mark.parametrize(
    "units",
    [
        SubsetRandomSampler(range(9)),
        WeightedRandomSampler([1.0] * 9, 9),
        BatchSampler(RandomSampler(range(9)), 2, False),
        [1, 2, 3],
        ByEpoch(),
    ],
)
def test_samplers_that_cannot_change_by_themselves_are_not_run_again(units):
    calls = []

    class Counting(type(units)):  # counts how often it runs, and is told apart from its base below
        def __iter__(self):
            calls.append(1)
            return super().__iter__()

    source = Source(units, batches=isinstance(units, BatchSampler))
    if not isinstance(units, (list, ByEpoch)):
        assert not source._changes_by_itself()
        return
    units = Counting(units) if isinstance(units, list) else Counting()
    Source(units).draw(OrderKey(0, 5))
    assert len(calls) == 1


def test_no_more_is_drawn_than_promised():
    class Endless(Sampler):
        def __iter__(self):
            while True:
                yield 1

        def __len__(self):
            return 5

    assert listed(Source(Endless()).draw(OrderKey(0, 0))) == [1] * 5


def test_a_stream_is_not_disturbed_by_draws_in_between():
    class Unsized(Sampler):
        def __iter__(self):
            while True:
                yield int(torch.randint(1000, ()))

    source = Source(Unsized())
    assert source.length is None
    stream = source.stream(OrderKey(2, 1))
    quiet = [next(stream) for _ in range(5)]
    stream = source.stream(OrderKey(2, 1))
    torch.manual_seed(0)
    expected = torch.rand(5).tolist()
    torch.manual_seed(0)
    noisy, outside = [], []
    for _ in range(5):
        noisy.append(next(stream))
        outside.append(float(torch.rand(())))
    assert noisy == quiet
    assert outside == expected
    assert quiet != [n for n, _ in zip(source.stream(OrderKey(2, 2)), range(5), strict=False)]


def test_plain_orders_are_pure_and_others_are_not():
    assert Source(SequentialSampler(range(3))).is_pure
    assert Source(RandomSampler(range(3))).is_pure
    assert not Source(RandomSampler(range(3), replacement=True)).is_pure
    assert not Source(RandomSampler(range(3), num_samples=2)).is_pure
    assert not Source(RandomSampler(range(3), generator=torch.Generator())).is_pure
    assert not Source(Curriculum()).is_pure
    assert not Source([[0, 1]], batches=True).is_pure
