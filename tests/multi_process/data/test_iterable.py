"""Data that only yields: said if it is the same everywhere, shared, ended together, resumed."""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_dp.data_plane.exchange import GroupJoin, open_group
from lightning_dp.errors import ConfigError, UnevenShardError
from tests.support.logs import log_lines
from tests.support.ranks import LIMIT_S, run_ranks
from tests.support.sampling import HookLearner, Learner, Numbers, SaveAt, fit
from tests.support.trainers import lean, ranks, trainer

pytestmark = pytest.mark.multi_process


class Stream(IterableDataset):
    """``start``, ``start + step``, ... below ``stop``, in every worker."""

    def __init__(self, stop, start=0, step=1, length=None):
        self.numbers, self.length = range(start, stop, step), length
        self.samples = Numbers(stop)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return (self.samples[i] for i in self.numbers)

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


class Batches:
    """An iterable of batches that is no DataLoader."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def _fit(rank, world_size, port, make, options, kwargs):
    messages = log_lines()
    module = Learner()
    fit(rank, world_size, port, module, loader=make(rank), options=options, **kwargs)
    return [(e, ids) for e, _, ids, _ in module.seen], messages


def test_the_same_data_on_all_ranks_is_said_once():
    def same(rank):
        return DataLoader(Stream(8), batch_size=2)

    results = ranks(_fit, 2, same, {}, {"max_epochs": 2})
    warnings = [m for m in results[0][1] if "every rank trains on the same data" in m]
    assert len(warnings) == 1
    assert "iterable='shard'" in warnings[0]
    assert not any("same data" in m for m in results[1][1])
    assert results[0][0] == results[1][0], "the control: it is the same data"

    for make, options in (
        (lambda rank: DataLoader(Stream(8, rank, 2), batch_size=2), {}),  # shards itself
        (same, {"iterable": "off"}),
        (same, {"iterable": "shard"}),
    ):
        assert not any("same data" in m for m in ranks(_fit, 2, make, options, {})[0][1])
    plain = ranks(_fit, 2, lambda rank: Batches(list(DataLoader(Stream(4), batch_size=2))), {}, {})
    assert any("same data" in m for m in plain[0][1]), "batches that come from no DataLoader too"


class Graph:
    """Holds its tensors in a dictionary of its own."""

    def __init__(self, sample):
        self.store = sample


class Packs(Learner):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch.store, batch_idx)


@pytest.mark.parametrize("kind", ["graph", "unknown"])
def test_objects_that_hold_other_data_are_not_the_same_data(kind):
    """``iterable="error"`` is about data that is the same; what cannot be compared is not said to be."""

    def pack(sample):
        packed = Graph({key: value.unsqueeze(0) for key, value in sample.items()})
        if kind == "unknown":
            packed.generator = (i for i in ())  # nothing can copy or compare it
        return packed

    def fitted(rank, world_size, port, start, step):
        data = Stream(8, start * rank, step)
        loader = DataLoader(data, batch_size=None, collate_fn=pack)
        fit(rank, world_size, port, Packs(), loader=loader, options={"iterable": "error"})
        return True

    assert all(ranks(fitted, 2, 1, 2))
    if kind == "unknown":
        assert all(ranks(fitted, 2, 0, 1))
    else:
        assert all(
            "same first batch" in text for text in ranks(fitted, 2, 0, 1, expect_failure=True)
        )


def test_the_same_data_can_be_an_error():
    def refused(rank, world_size, port):
        with pytest.raises(ConfigError, match="same first batch"):
            _fit(
                rank,
                world_size,
                port,
                lambda rank: DataLoader(Stream(8)),
                {"iterable": "error"},
                {},
            )
        return True

    assert all(ranks(refused, 2))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("length", [None, 11])
def test_shard_gives_each_item_to_one_rank_in_equal_steps(workers, length):
    def make(rank):
        return DataLoader(Stream(11, length=length), batch_size=2, num_workers=workers)

    for world_size in (1, 2, 3):
        results = ranks(_fit, world_size, make, {"iterable": "shard"}, {"max_epochs": 2})
        for epoch in (0, 1):
            mine = [[ids for e, ids in seen if e == epoch] for seen, _ in results]
            items = Counter(i for seen in mine for ids in seen for i in ids)
            parts = world_size * max(1, workers)
            assert items == dict.fromkeys(range(11 - 11 % parts), 1), (world_size, epoch)
            assert len({tuple(map(len, seen)) for seen in mine}) == 1


def test_shard_evaluates_each_item_once():
    def validate(rank, world_size, port):
        module = Learner()
        t = trainer(world_size, port, lean(iterable="shard"))
        (metrics,) = t.validate(module, DataLoader(Stream(7), batch_size=2), verbose=False)
        return metrics["mean"], module.evaluated

    for world_size in (1, 2, 3):
        results = ranks(validate, world_size)
        assert all(mean == pytest.approx(3.0) for mean, _ in results)
        items = sorted(i for _, seen in results for ids in seen for i in ids)
        assert items == list(range(7))


def test_a_global_batch_size_is_divided():
    def make(rank):
        return DataLoader(Stream(16), batch_size=4)

    options = {"iterable": "shard", "batch_size": "global"}
    results = ranks(_fit, 2, make, options, {})
    assert [ids for _, ids in results[0][0]] == [[0, 2], [4, 6], [8, 10], [12, 14]]


UNEVEN = {
    "no length": lambda rank: DataLoader(Stream(20 - 8 * rank, rank, 2), batch_size=2),
    "two workers": lambda rank: DataLoader(Stream(20 - 8 * rank, rank), batch_size=2, num_workers=2),
    "a wrong length": lambda rank: DataLoader(Stream(20 - 8 * rank, rank, length=20), batch_size=2),
    "no loader": lambda rank: Batches(list(DataLoader(Numbers(9 - 4 * rank), batch_size=2))),
    "nothing at all": lambda rank: DataLoader(Stream(6 - 6 * rank), batch_size=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNEVEN)
def test_uneven_ends_are_an_error_that_names_the_ranks(kind):
    def refused(rank, world_size, port):
        with pytest.raises(UnevenShardError) as caught:
            fit(rank, world_size, port, Learner(), loader=UNEVEN[kind](rank), max_epochs=2)
        return caught.value.ranks, str(caught.value)

    for names, message in ranks(refused, 2, timeout_s=20):
        assert names == (1,)
        assert "uneven_train='min'" in message


@pytest.mark.parametrize(
    ("kind", "iterable", "batches", "says", "not_said"),
    [
        ("no length", "shard", 3, "needs a dataset that yields the same items", "shares it evenly"),
        ("no length", "off", 6, "iterable='shard', which shares it evenly", "needs a dataset"),
        ("no loader", "off", 3, "same number of batches, or choose", "shard"),
    ],
)
def test_uneven_ends_are_told_in_the_users_words(kind, iterable, batches, says, not_said):
    """Once it named a class of ours, and recommended what was chosen already."""

    def make(rank):
        if kind == "no loader":
            return UNEVEN[kind](rank)
        return DataLoader(Stream(20 - 8 * rank), batch_size=2)

    def refused(rank, world_size, port):
        with pytest.raises(UnevenShardError) as caught:
            fit(rank, world_size, port, Learner(), None, {"iterable": iterable}, make(rank))
        return str(caught.value)

    for message in ranks(refused, 2, timeout_s=20):
        assert f"rank(s) [1] had {batches} batches, and rank(s) [0] have more" in message
        assert says in message
        assert not_said not in message
        assert ("(Batches)" if kind == "no loader" else "(Stream)") in message


@pytest.mark.parametrize("kind", UNEVEN)
def test_uneven_ends_can_be_a_common_end(kind):
    options = {"uneven_train": "min", "iterable": "off"}
    results = ranks(_fit, 2, UNEVEN[kind], options, {"max_epochs": 2}, timeout_s=20)
    steps = {len(seen) for seen, _ in results}
    assert len(steps) == 1
    if kind != "nothing at all":
        assert steps.pop() % 2 == 0, "both epochs have the same length"


def test_lengths_that_differ_are_seen_before_training():
    def make(rank):
        return DataLoader(Stream(20 - 8 * rank, length=20 - 8 * rank), batch_size=2)

    def refused(rank, world_size, port):
        with pytest.raises(UnevenShardError, match=r"\[10, 6\] by rank"):
            fit(rank, world_size, port, Learner(), loader=make(rank))
        return True

    assert all(ranks(refused, 2, timeout_s=20))
    results = ranks(_fit, 2, make, {"uneven_train": "min", "iterable": "off"}, {}, timeout_s=20)
    assert [len(seen) for seen, _ in results] == [6, 6]


def test_loaders_that_the_user_shards_unevenly_end_together_too():
    def make(rank):
        return DataLoader(Numbers(8), batch_size=1, sampler=range(rank, 8 - 2 * rank))

    flag = {"use_distributed_sampler": False}

    def refused(rank, world_size, port):
        with pytest.raises(UnevenShardError, match=r"\[8, 5\] by rank"):
            fit(rank, world_size, port, Learner(), loader=make(rank), **flag)
        return True

    assert all(ranks(refused, 2, timeout_s=20))
    results = ranks(_fit, 2, make, {"uneven_train": "min"}, flag, timeout_s=20)
    assert [len(seen) for seen, _ in results] == [5, 5]


def test_set_epoch_reaches_a_dataset_before_its_workers_start():
    class Tells(Stream):
        def __iter__(self):
            assert get_worker_info() is not None
            epoch = self.epochs[-1]
            return (self.samples[i + 4 * epoch] for i in range(4))

    def fitted(rank, world_size, port):
        module = Learner()
        data = DataLoader(Tells(16), batch_size=4, num_workers=1)
        fit(rank, world_size, port, module, loader=data, options={"iterable": "off"}, max_epochs=3)
        return [ids for *_, ids, _ in module.seen]

    assert ranks(fitted, 1)[0] == [[4 * e + i for i in range(4)] for e in range(3)]


# Loaders that keep a state of their own


class Stateful:
    """Yields numbers of this rank, and says how far it has read."""

    def __init__(self, rank, world_size, n=12, merges=False):
        self.rank, self.world_size, self.n, self.at = rank, world_size, n, 0
        if merges:
            self.merge_state_dicts = self._merge

    def __iter__(self):
        samples = Numbers(self.n)
        self.at %= self.n
        while self.at < self.n:
            index = self.at
            self.at += self.world_size
            item = samples[index + self.rank]
            yield {key: value.unsqueeze(0) for key, value in item.items()}

    def state_dict(self):
        return {"at": self.at, "rank": self.rank}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank, "another rank's state"
        self.at = state["at"]

    def _merge(self, states, rank, world_size):
        return {"at": max(state["at"] for state in states), "rank": rank}


class Sized(Stateful):
    def __len__(self):
        return self.n // self.world_size


def _stateful(rank, world_size, port, kind, path, folder, merges=False, estimate=False):
    messages = log_lines()
    module = HookLearner(
        {"train": lambda: kind(rank, world_size, merges=merges)}, estimate=estimate
    )
    callbacks = [] if path else [SaveAt(folder, "on_train_batch_end")]
    limits = {"max_steps": 12, "max_epochs": 2} if kind is Stateful else {"max_epochs": 2}
    fit(rank, world_size, port, module, path, callbacks=callbacks, **limits)
    return [ids[0] for *_, ids, _ in module.seen], messages


@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("kind", [Stateful, Sized])
@pytest.mark.parametrize("world_size", [1, 2])
def test_stateful_loaders_get_their_own_ranks_state_back(world_size, kind, estimate, tmp_path):
    """What was trained counts, not what was read ahead."""
    straight = ranks(_stateful, world_size, kind, None, tmp_path, False, estimate)
    per_epoch = 12 // world_size
    for done in (1, 2, per_epoch - 1, per_epoch, per_epoch + 1):
        if done >= 12:
            continue
        path = str(tmp_path / f"{done - 1:03d}.ckpt")
        again = ranks(_stateful, world_size, kind, path, tmp_path, False, estimate)
        for (seen, _), (whole, _) in zip(again, straight, strict=True):
            assert seen == whole[done:], f"after {done}"


def test_stateful_loaders_and_another_number_of_ranks(tmp_path):
    ranks(_stateful, 2, Sized, None, tmp_path)
    path = str(tmp_path / "002.ckpt")  # 6 of 12
    seen, messages = ranks(_stateful, 1, Sized, path, tmp_path)[0]
    assert seen == [*range(12), *range(12)], "the epoch begins anew"
    assert any(
        m.startswith("lean_ddp: Sized keeps") and "of 2 rank(s), not 1" in m for m in messages
    )
    seen, _ = ranks(_stateful, 1, Sized, path, tmp_path, True)[0]
    assert seen[:6] == list(range(6, 12)), "it merges"


class StatefulLoader(DataLoader):
    """A map-style loader that counts the batches it gave, like torchdata's."""

    given = 0
    skip = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        self.given = skip
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skip = state["given"]


def _map_style(rank, world_size, port, path, folder):
    def make():
        return StatefulLoader(Numbers(24), batch_size=2, shuffle=True)

    module = HookLearner({"train": make})
    callbacks = [] if path else [SaveAt(folder, "on_train_batch_end")]
    fit(rank, world_size, port, module, path, callbacks=callbacks, max_epochs=2)
    return module.seen


@pytest.mark.parametrize("done", [1, 3, 6, 8])
def test_map_style_loaders_with_a_state_are_not_moved_twice(done, tmp_path):
    straight = ranks(_map_style, 2, None, tmp_path)
    path = str(tmp_path / f"{done - 1:03d}.ckpt")
    again = ranks(_map_style, 2, path, tmp_path)
    for seen, whole in zip(again, straight, strict=True):
        assert [s[:3] for s in seen] == [s[:3] for s in whole[done:]]
    alone = ranks(_map_style, 1, path, tmp_path)[0]
    epoch = done // 6
    left = [i for e, _, ids, _ in alone if e == epoch for i in ids]
    trained = [i for seen in straight for s in seen[epoch * 6 : done] for i in s[2]]
    assert sorted(left + trained) == list(range(24)), "another number of ranks: our own position"
    assert torch.load(path, weights_only=True)["lean_ddp"]["data"]["loader_states"]


def _interrupted(rank, world_size):
    join = GroupJoin(open_group(None, lambda what: nullcontext()), "error", "off", "x", "")
    if rank == 1:
        dist.barrier()  # until rank 0 waits no longer
        return join.post(False)()

    def stop(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    all_have_one = join.post(False)
    begin = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        all_have_one()
    seconds = time.monotonic() - begin
    dist.barrier()
    return seconds if not all_have_one() else None


def test_a_wait_for_the_end_of_other_ranks_can_be_interrupted():
    seconds, goes_on = run_ranks(_interrupted, 2)
    assert seconds < LIMIT_S
    assert not goes_on
