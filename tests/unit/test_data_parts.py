"""Parts of the data plane that need no process group."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from lightning_dp.data.content_hash import NOTHING, content_hash, selection_hash
from lightning_dp.data.eval_batches import EvalBatches
from lightning_dp.data.iterable import ShardedIterable
from lightning_dp.data.join import join_ends
from lightning_dp.data.loader import (
    LoaderParts,
    RankSampler,
    Shard,
    copy_loader,
    give_batches,
    is_sharded_by_user,
    is_stateful,
    original,
)
from lightning_dp.data.share import Cursor
from lightning_dp.data.state import VERSION, DataState, LoaderState
from lightning_dp.data.stream import StreamBatches
from lightning_dp.data.train_batches import TrainBatches
from lightning_dp.data_plane.gather import join_samples, merge_batches, split_samples
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.errors import ConfigError
from lightning_dp.options import DataOptions

ALONE = ReplicaGroup(None, 0, 1, torch.device("cpu"))


def train(loader, rank=0, world_size=2, start=None, begun=lambda: 0, seed=0):
    return TrainBatches(LoaderParts.of(loader), Shard(rank, world_size, seed), start, begun)


# Loaders


class Picky(DataLoader):
    def __init__(self, dataset, required, *, also_required):
        super().__init__(dataset, batch_size=2, shuffle=True)
        self.mine = required


def test_a_loader_is_copied_and_not_made_again():
    loader = Picky(range(8), "x", also_required=True)
    before = dict(vars(loader))
    copy = give_batches(train(loader))
    assert type(copy) is Picky
    assert copy.mine == "x"
    assert vars(loader) == before
    assert isinstance(copy.sampler, DistributedSampler)
    assert copy.batch_sampler.sampler is copy.sampler
    assert original(copy) is loader
    assert original(loader) is loader
    assert len(copy) == 2
    assert len(list(copy)) == 2
    assert copy_loader(loader, dataset=range(4)).dataset == range(4)


def test_what_is_in_a_loader():
    stock = LoaderParts.of(DataLoader(range(8), batch_size=3, drop_last=True))
    assert (stock.batch_size, stock.drop_last, stock.source.batches) == (3, True, False)
    inner = BatchSampler(RandomSampler(range(8)), 2, False)
    parts = LoaderParts.of(DataLoader(range(8), batch_sampler=inner))
    assert parts.source.units is inner.sampler
    assert (parts.batch_size, parts.source.batches) == (2, False)
    own = LoaderParts.of(DataLoader(range(8), batch_sampler=[[0], [1]]))
    assert own.source.batches
    none = LoaderParts.of(DataLoader(range(8), batch_size=None))
    assert (none.batch_size, none.source.batches) == (1, False)


def test_a_users_distributed_sampler_is_seen():
    own = DistributedSampler(range(8), 2, 0)  # type: ignore[arg-type]
    assert is_sharded_by_user(DataLoader(range(8), sampler=own))
    assert is_sharded_by_user(DataLoader(range(8), batch_sampler=BatchSampler(own, 2, False)))
    assert not is_sharded_by_user(DataLoader(range(8)))
    assert not is_sharded_by_user(give_batches(train(DataLoader(range(8)))))


def test_a_loader_without_batches_yields_its_share():
    loader = DataLoader(range(7), batch_size=None)
    copies = [give_batches(train(loader, rank)) for rank in (0, 1)]
    assert [list(copy) for copy in copies] == [[0, 2, 4, 6], [1, 3, 5, 0]]
    assert [len(copy) for copy in copies] == [4, 4]
    exact = [EvalBatches(LoaderParts.of(loader), Shard(rank, 2, 0)) for rank in (0, 1)]
    assert [list(give_batches(each)) for each in exact] == [[0, 2, 4, 6], [1, 3, 5]]


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset():
    class Told(list):
        def __init__(self, *args):
            super().__init__(*args)
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    dataset, sampler = Told(range(4)), Told(range(4))
    batches = train(DataLoader(dataset, sampler=sampler, batch_size=2))
    batches.sampler.set_epoch(3)
    assert dataset.epochs[-1] == sampler.epochs[-1] == 3
    assert isinstance(batches.sampler, RankSampler)
    assert batches.sampler.epoch == 3


# A pass that is cut


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 5),
    world=st.integers(1, 4),
    other=st.integers(1, 4),
    cut=st.integers(0, 12),
    shuffle=st.booleans(),
)
def test_a_cut_pass_goes_on_in_the_same_order(n, size, world, other, cut, shuffle):
    loader = DataLoader(range(n), batch_size=size, shuffle=shuffle)
    first = [train(loader, rank, world, Cursor(2)) for rank in range(world)]
    cut = min(cut, len(first[0]) - 1)
    trained = [i for each in first for batch in list(each)[:cut] for i in batch]
    cursor = first[0].cursor_after(2, cut)
    assert cursor.consumed == len(trained)
    then = [train(loader, rank, other, cursor) for rank in range(other)]
    batches = [list(each) for each in then]
    left = [i for each in batches for batch in each for i in batch]
    assert len({len(each) for each in batches}) == 1
    assert set(trained) | set(left) == set(range(n))
    assert len(trained) + len(left) < n + other
    assert then[0].first_batch + len(batches[0]) == len(then[0])


def test_passes_are_counted_by_what_was_trained():
    """Asking for an iterator twice is not a second pass; using the first one up and more is."""
    begun = 0
    batches = train(DataLoader(range(8), batch_size=2, shuffle=True), begun=lambda: begun)
    first = list(batches)
    assert list(batches) == first
    begun = 2
    second = list(batches)
    assert second != first
    begun = 4
    assert list(batches) not in (first, second)
    batches.sampler.set_epoch(1)
    begun = 0
    assert list(batches) not in (first, second)


def test_a_stream_has_no_length_and_goes_on():
    class Unsized:
        def __iter__(self):
            return iter(range(11))

    loader = DataLoader(range(11), batch_size=2, sampler=Unsized())
    parts = LoaderParts.of(loader)
    both = [StreamBatches(parts, Shard(rank, 2, 0)) for rank in (0, 1)]
    with pytest.raises(TypeError, match="Unsized"):
        len(both[0])
    assert [list(each) for each in both] == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    again = StreamBatches(parts, Shard(0, 3, 0), both[0].cursor_after(0, 1))
    assert list(again) == [[4, 7]]
    last = [StreamBatches(parts, Shard(r, 2, 0), training=False) for r in (0, 1)]
    assert [list(each) for each in last] == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9]]]


# Iterables


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_an_iterable_is_shared_item_by_item():
    shares = [list(ShardedIterable(Stream(), rank, 3, equal=False)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    equal = [list(ShardedIterable(Stream(), rank, 3, equal=True)) for rank in range(3)]
    assert equal == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(TypeError):
        len(ShardedIterable(Stream(), 0, 3, equal=True))
    assert len(ShardedIterable(Stream(), 0, 3, equal=True, length=5)) == 5


class Keeps:
    """Reads ahead, as loaders do."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_the_state_is_the_one_of_what_was_trained():
    trained = 0
    loader = Keeps()
    stand = join_ends(loader, lambda: trained, None)
    assert is_stateful(stand)
    assert stand.state_dict() is None, "nothing is asked of a loader before its first batch"
    iterator = iter(stand)
    assert [next(iterator), next(iterator), next(iterator)] == [0, 1, 2]
    trained = 1
    assert loader.state_dict() == {"at": 3}, "the control: what was read"
    assert stand.state_dict() == {"at": 1}
    assert stand.state_dict(back=1) is None, "the head of a pass"
    again = Keeps()
    stand = join_ends(again, lambda: 0, None)
    stand.load_state_dict({"at": 4})
    assert again.at == 0, "not before its pass begins"
    assert stand.state_dict() == {"at": 4}
    assert list(stand) == [4, 5]


class Sensitive(DataLoader):
    """Keeps state as litdata does: asked before its first batch, it forgets a restored position."""

    def __init__(self, n=6):
        super().__init__(Counted(n), batch_size=None)
        self.loaded, self.at, self.order = None, 0, []

    def __iter__(self):
        self.at = self.loaded["at"] if self.loaded is not None else 0
        for item in list(super().__iter__())[self.at :]:
            self.at += 1
            yield item

    def state_dict(self):
        state = self.loaded if self.loaded is not None else {}
        state["at"] = self.at  # the dictionary that was loaded is written to, and given out
        return state

    def load_state_dict(self, state):
        self.loaded = state


class Counted(IterableDataset):
    def __init__(self, n):
        self.n = n

    def set_epoch(self, epoch):
        raise AssertionError("the loader counts epochs")

    def __iter__(self):
        return iter(range(self.n))


def test_a_restored_loader_is_asked_nothing_before_its_first_batch():
    trained = 0
    saved = {"at": 2}
    loader = join_ends(Sensitive(), lambda: trained, None, keep=4, state=saved)
    assert LoaderParts.of(loader).epoch_targets == []
    assert loader.state_dict() == {"at": 2}
    iterator = iter(loader)
    assert next(iterator) == 2
    assert loader.state_dict() == {"at": 2}, "read, and not trained yet"
    assert next(iterator) == 3
    trained = 1
    assert loader.state_dict() == {"at": 3}
    trained = 2
    assert [loader.state_dict(back=back) for back in range(3)] == [{"at": 4}, {"at": 3}, {"at": 2}]
    assert saved == {"at": 2}, "the checkpoint's dictionary is not written to"
    plain = Sensitive()
    plain.load_state_dict({"at": 2})
    plain.state_dict()
    assert list(plain) != [2, 3, 4, 5], "the control: asked before, it begins elsewhere"


class Graph:
    """Holds what it has in its ``__dict__``, as torch_geometric's do."""

    def __init__(self, x):
        self.store = {"x": x}


@dataclass
class Pair:
    x: Any
    name: str


def test_batches_are_told_apart():
    batches = [
        torch.zeros(3),
        torch.zeros(4),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.bfloat16),
        {"a": torch.zeros(3)},
        {"b": torch.zeros(3)},
        [torch.zeros(3), "x"],
        (torch.zeros(3), "y"),
        torch.ones(3),
        np.zeros(3),
        np.ones(3),
        Graph(torch.zeros(3)),
        Graph(torch.ones(3)),
        Graph(np.ones(3)),
        Pair(torch.zeros(3), "x"),
        Pair(torch.zeros(3), "y"),
        [Graph(torch.zeros(3))],
        torch.tensor(True),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
        torch.zeros(1 << 17),
        torch.cat([torch.zeros((1 << 17) - 1), torch.ones(1)]),
    ]
    values = [content_hash(batch) for batch in batches]
    assert len(set(values)) == len(values)
    assert all(0 < value < 2**63 for value in values)
    assert content_hash({"a": torch.zeros(3)}) == values[4]
    assert content_hash(Pair(torch.zeros(3), "x")) == content_hash(Pair(torch.zeros(3), "x"))
    assert content_hash(NOTHING) == 0
    assert content_hash(i for i in ()) == content_hash(threading.Lock()) == 0, "nothing can be said"


def test_a_hash_of_what_a_dataset_selects():
    def rows():
        return TensorDataset(torch.zeros(8))

    class Wraps(Dataset):
        def __init__(self, data):
            self.data = data

    one, two = Subset(rows(), [0, 1]), Subset(rows(), [0, 2])
    kinds = [
        rows(),
        one,
        two,
        Subset(one, [0]),
        Subset(two, [0]),
        ConcatDataset([one, two]),
        Wraps(two),
    ]
    kinds += [Subset(rows(), range(3)), Subset(rows(), torch.tensor([5])), Subset(rows(), ["a"])]
    hashes = [selection_hash(each) for each in kinds]
    assert hashes[6] == hashes[2]
    assert len(set(hashes)) == len(hashes) - 1
    assert selection_hash(Subset(rows(), np.array([0, 1]))) == selection_hash(
        Subset(rows(), np.array([0, 1]))
    )
    loop = Wraps(None)
    loop.data = loop
    assert selection_hash(loop) == selection_hash(rows()) == selection_hash([1, 2])


# State


def test_a_state_survives_a_checkpoint():
    state = DataState(
        epoch=3,
        seed=7,
        world_size=2,
        accumulate=4,
        batches=5,
        loaders=(LoaderState("sample", 100, 4, 1, 40, 99), LoaderState()),
        loader_states=({1: {"at": 3}}, {1: {"at": 4}}),
        reload_epoch=2,
    )
    assert DataState.from_checkpoint(state.to_checkpoint()) == state
    assert DataState.from_checkpoint({**state.to_checkpoint(), "version": VERSION + 1}) is None
    assert state.start(0) == Cursor(3, 1, 40)
    assert state.start(5) == Cursor(3)
    assert state.effective_batch == 32
    assert replace(state, loaders=()).effective_batch == 0
    assert state.changed(0, 7, "sample", 100) is None
    assert "seed" in state.changed(0, 8, "sample", 100)
    assert "batch" in state.changed(0, 7, "batch", 100)
    assert "101" in state.changed(0, 7, "sample", 101)
    assert "2 training loader" in state.changed(2, 7, "sample", 100)


# Predictions


def test_predictions_are_taken_apart_and_put_together():
    i = torch.arange(3)
    for batch in (
        i,
        [1, 2, 3],
        ["a", "b", "c"],
        {"x": i, "y": ["a", "b", "c"]},
        (i, i.double()),
        [{"x": i}, i],
        {"x": {"deep": i}},
    ):
        samples = split_samples(batch, 3)
        assert len(samples) == 3
        joined = join_samples(samples)
        again = split_samples(joined, 3)
        assert str(again) == str(samples)
    for whole in (None, 3, torch.tensor(1.0), torch.zeros(2), [1, 2], {}, {"x": i, "n": 3}):
        assert split_samples(whole, 3) is None
    uneven = split_samples([torch.zeros(2), torch.zeros(3)], 2)
    assert [len(value) for value in join_samples(uneven)] == [2, 3]


def test_predictions_of_one_rank_are_sorted_too():
    merged = merge_batches([torch.tensor([5, 1]), torch.tensor([3])], [[2, 0], [1]], ALONE)
    assert [batch.tolist() for batch in merged] == [[1, 3], [5]]
    whole = merge_batches(["b", "a"], [[2, 3], [0, 1]], ALONE)
    assert whole == ["a", "b"]
    assert merge_batches(["b", "a"], None, ALONE) == ["b", "a"]
    assert merge_batches([], [], ALONE) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterable", "split"),
        ("uneven_train", "max"),
        ("eval_padding", "drop"),
        ("batch_size", 8),
        ("resume", "never"),
        ("rank_rng", True),
        ("gather_predictions", "yes"),
        ("strict_data", 1),
    ],
)
def test_options_are_checked(name, value):
    with pytest.raises(ConfigError, match=name):
        DataOptions(**{name: value})
