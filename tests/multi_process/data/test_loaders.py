"""Training loaders of every kind: the user's order, each sample once, equal steps."""

from __future__ import annotations

import random

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from lightning_dp.errors import ConfigError
from tests.support.logs import log_lines
from tests.support.sampling import (
    HookLearner,
    Learner,
    Numbers,
    SaveAt,
    counts_of,
    epochs_of,
    fit,
    loader,
)
from tests.support.trainers import ddp, lean, ranks, trainer

pytestmark = pytest.mark.multi_process


def joined(lists):
    return [item for each in lists for item in each or ()]


# Parity with ddp


def _parity(rank, world_size, port, kind, n, size):
    strategy = ddp() if kind == "ddp" else lean()
    module = Learner()
    t = trainer(world_size, port, strategy, max_epochs=3)
    t.fit(module, loader(n, size, shuffle=True))
    return [(e, i, ids) for e, i, ids, _ in module.seen]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("n", [24, 23])
def test_shuffled_batches_are_those_of_ddp(world_size, n):
    assert ranks(_parity, world_size, "lean", n, 3) == ranks(_parity, world_size, "ddp", n, 3)


def test_the_control_another_seed_gives_other_batches():
    def other(rank, world_size, port):
        import os

        os.environ["PL_GLOBAL_SEED"] = "1"
        return _parity(rank, world_size, port, "lean", 24, 3)

    assert ranks(other, 2) != ranks(_parity, 2, "ddp", 24, 3)


def test_without_a_seed_each_run_has_an_order_of_its_own_and_resumes_in_it(tmp_path):
    def unseeded(rank, world_size, port, path):
        import os

        module = HookLearner({"train": lambda: loader(24, 3, shuffle=True)})
        t = trainer(world_size, port, lean(), max_epochs=1,
                    callbacks=[SaveAt(tmp_path, "on_train_batch_end")] if path is None else [])  # fmt: skip
        del os.environ["PL_GLOBAL_SEED"]
        t.fit(module, ckpt_path=path)
        return module.seen

    first, second = ranks(unseeded, 2, None), ranks(unseeded, 2, None)
    assert epochs_of(first) != epochs_of(second)
    assert counts_of(first, 0) == dict.fromkeys(range(24), 1)
    again = ranks(unseeded, 2, str(tmp_path / "001.ckpt"))
    assert epochs_of(again)[0] == epochs_of(second)[0][2:]


# Kinds of loaders


class Curriculum(Sampler):
    """Easy first, and from the second epoch on the other way round; counts for itself."""

    def __init__(self, n):
        self.n, self.calls = n, 0

    def __iter__(self):
        self.calls += 1
        return iter(range(self.n) if self.calls == 1 else reversed(range(self.n)))

    def __len__(self):
        return self.n


class Tokens(Sampler):
    """A batch sampler with a constructor of its own, not torch's, without a ``sampler``."""

    def __init__(self, lengths, max_tokens):
        self.lengths, self.max_tokens, self.epochs = lengths, max_tokens, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        order = torch.randperm(len(self.lengths)).tolist()
        batch, tokens = [], 0
        for index in order:
            if tokens + self.lengths[index] > self.max_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += self.lengths[index]
        yield batch

    def __len__(self):
        return 99  # more than it yields: nobody may rely on it


class Pairs(BatchSampler):
    """A subclass of torch's with another constructor."""

    def __init__(self, n, *, step):
        super().__init__(range(n), 2, False)
        self.n, self.step = n, step

    def __iter__(self):
        for start in range(0, self.n, 2 * self.step):
            for at in range(start, min(start + self.step, self.n - self.step)):
                yield [at, at + self.step]

    def __len__(self):
        return self.n // 2


class Loader(DataLoader):
    """A loader with required arguments that are no attributes."""

    def __init__(self, what, how_many, /, secret):
        super().__init__(what(how_many), batch_size=2, shuffle=False)
        assert secret


def kinds():
    numbers = Numbers(16)
    return {
        "in order": lambda: loader(16, 2),
        "curriculum": lambda: DataLoader(numbers, batch_size=2, sampler=Curriculum(16)),
        "a list": lambda: DataLoader(numbers, batch_size=2, sampler=list(reversed(range(16)))),
        "weighted": lambda: DataLoader(
            numbers, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 2 + [0.0] * 14, 16), 4, False)
        ),
        "without replacement": lambda: DataLoader(
            numbers, batch_size=2, sampler=WeightedRandomSampler([1.0] * 16, 16, replacement=False)
        ),
        "tokens": lambda: DataLoader(numbers, batch_sampler=Tokens([3, 5, 2, 7] * 4, 9)),
        "pairs": lambda: DataLoader(numbers, batch_sampler=Pairs(16, step=2)),
        "own loader": lambda: Loader(Numbers, 16, secret=True),
        "no batches": lambda: DataLoader(numbers, batch_size=None, shuffle=True),
        "own generator": lambda: loader(16, 2, shuffle=True, generator=torch.Generator().manual_seed(4)),
    }  # fmt: skip


def _kind(rank, world_size, port, hook, epochs=2):
    torch.manual_seed(100 + rank)  # the ranks' own generators have gone apart
    random.seed(rank)
    out = {}
    for name, make in kinds().items():
        given = make()
        before = dict(vars(given))
        module = HookLearner({"train": lambda given=given: given}) if hook else Learner()
        fit(rank, world_size, port, module, loader=None if hook else given, max_epochs=epochs)
        after = {key: value for key, value in vars(given).items() if not key.startswith("_")}
        assert all(before[key] is value for key, value in after.items()), (
            "the user's loader changed"
        )
        seen = [
            (e, i, ids if isinstance(ids, list) else [ids], loss) for e, i, ids, loss in module.seen
        ]
        out[name] = seen, getattr(given.batch_sampler, "epochs", None)
    return out


@pytest.mark.parametrize("hook", [True, False])
def test_every_kind_of_loader(hook):
    by_rank = ranks(_kind, 2, hook)
    alone = ranks(_kind, 1, hook)[0]

    def seen(name):
        return [each[name][0] for each in by_rank]

    for name in kinds():
        steps = epochs_of(seen(name))
        assert len({len(each) for each in seen(name)}) == 1, name
        if name not in ("weighted", "tokens"):
            for epoch in (0, 1):
                assert counts_of(seen(name), epoch) == dict.fromkeys(range(16), 1), name
        if name != "tokens":  # an odd number of batches is filled up
            whole = {e: joined(s) for e, s in epochs_of([alone[name][0]]).items()}
            assert {e: sorted(joined(s)) for e, s in steps.items()} == {
                e: sorted(w) for e, w in whole.items()
            }, f"{name}: other samples than on one device"
    first = [each[0][2] for each in seen("in order")]
    assert first == [[0, 2], [1, 3]]
    assert epochs_of(seen("curriculum"))[0][0] == [0, 1, 2, 3]
    assert epochs_of(seen("curriculum"))[1][0] == [12, 13, 14, 15]
    assert epochs_of(seen("a list"))[0][0] == [12, 13, 14, 15]
    weighted = [ids for each in seen("weighted") for _, _, ids, _ in each]
    assert all(set(ids) <= {0, 1} for ids in weighted)
    assert all(len(ids) == 2 for ids in weighted) or all(len(ids) == 4 for ids in weighted)
    lengths = [3, 5, 2, 7] * 4
    tokens = [ids for each in seen("tokens") for e, _, ids, _ in each if e == 0]
    assert all(sum(lengths[i] for i in ids) <= 9 for ids in tokens)
    assert set(joined(tokens)) == set(range(16))
    assert {tuple(ids) for _, _, ids, _ in seen("pairs")[0] + seen("pairs")[1]} == {
        (a, a + 2) for a in (0, 1, 4, 5, 8, 9, 12, 13)
    }
    epochs = by_rank[0]["tokens"][1]
    assert sorted(set(epochs)) == [0, 1]
    assert epochs_of(seen("own generator"))[0] != epochs_of(seen("own generator"))[1]


def _resume_kinds(rank, world_size, port, folder, saved_by):
    out = {}
    for name, make in kinds().items():
        if name == "own loader":
            continue
        torch.manual_seed(1000 + rank)
        save, module = SaveAt(folder / name, "on_train_batch_end"), HookLearner({"train": make})
        if saved_by is None:
            fit(rank, world_size, port, module, max_epochs=2, callbacks=[save])
        else:
            paths = sorted((folder / name).iterdir())
            path = paths[len(paths) // 2]  # one batch into the second epoch
            fit(rank, world_size, port, module, str(path), max_epochs=2)
        out[name] = [
            (e, i, ids if isinstance(ids, list) else [ids], loss) for e, i, ids, loss in module.seen
        ]
    return out


@pytest.mark.parametrize("world_size", [2, 1])
def test_every_kind_of_loader_resumes(world_size, tmp_path):
    straight = ranks(_resume_kinds, 2, tmp_path, None)
    again = ranks(_resume_kinds, world_size, tmp_path, 2)
    for name in straight[0]:
        whole = epochs_of([each[name] for each in straight])[1]
        rest = epochs_of([each[name] for each in again])
        assert set(rest) == {1}
        flat = [i for step in rest[1] for i in step]
        want = [i for step in whole[1:] for i in step]
        if name == "tokens" and world_size == 1:  # no batch is repeated to fill up a round
            assert set(flat) <= set(want)
        else:
            assert sorted(flat) == sorted(want), name


# Samplers that differ between ranks


class Stubborn(Sampler):
    """Draws from something that no seed of ours reaches."""

    def __init__(self, rank):
        self.random = random.Random(rank)

    def __iter__(self):
        return iter(self.random.sample(range(12), 12))

    def __len__(self):
        return 12


def _stubborn(rank, world_size, port, options):
    messages = log_lines()
    module = Learner()
    data = DataLoader(Numbers(12), batch_size=2, sampler=Stubborn(rank))
    fit(rank, world_size, port, module, loader=data, options=options, max_epochs=2)
    return module.seen, messages


def test_ranks_that_draw_differently_use_rank_0s_order():
    results = ranks(_stubborn, 2, {})
    for epoch in (0, 1):
        assert counts_of([seen for seen, _ in results], epoch) == dict.fromkeys(range(12), 1)
    warnings = [m for m in results[0][1] if "Stubborn drew another order on rank(s) [1]" in m]
    assert len(warnings) == 1


def test_ranks_that_draw_differently_can_be_an_error():
    def refused(rank, world_size, port):
        with pytest.raises(ConfigError, match="Stubborn"):
            _stubborn(rank, world_size, port, {"strict_data": True})
        return True

    assert all(ranks(refused, 2))


def test_datasets_of_different_length_are_an_error_on_all():
    def refused(rank, world_size, port):
        with pytest.raises(ConfigError, match=r"\[10, 11\] by rank"):
            fit(rank, world_size, port, Learner(), loader=loader(10 + rank, 2))
        return True

    assert all(ranks(refused, 2))


# Left alone


def _left_alone(rank, world_size, port):
    own = DistributedSampler(Numbers(8), world_size, rank, shuffle=False)
    out = []
    for data, kwargs in (
        (DataLoader(Numbers(8), batch_size=2, sampler=own), {}),
        (loader(8, 2), {"use_distributed_sampler": False}),
    ):
        module = Learner()
        t = fit(rank, world_size, port, module, loader=data, **kwargs)
        assert t.train_dataloader is data
        out.append([ids for *_, ids, _ in module.seen])
        t.validate(module, data, verbose=False)
        predicted = t.predict(module, data)
        out.append([batch.tolist() for batch in predicted])
    return out


def test_a_users_own_sharding_is_left_alone():
    both = ranks(_left_alone, 2)
    assert [each[0] for each in both] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert all(each[0] == each[1] for each in both)
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(each[2] == whole and each[3] == whole for each in both)


# Batch sizes, limits, tails


def _sizes(rank, world_size, port, cases):
    out = []
    for n, size, options, kwargs, dl in cases:
        messages = log_lines()
        module = Learner()
        fit(rank, world_size, port, module, loader=loader(n, size, **dl), options=options, **kwargs)
        out.append((module.seen, messages))
    return out


def test_batch_sizes_limits_and_tails():
    cases = [
        (12, 4, {"batch_size": "global"}, {}, {}),
        (9, 2, {}, {}, {"drop_last": True}),
        (9, 2, {}, {}, {}),
        (24, 2, {}, {"limit_train_batches": 0.5}, {}),
        (24, 2, {}, {"overfit_batches": 1, "max_epochs": 2}, {"shuffle": True}),
        (24, 2, {}, {"accumulate_grad_batches": 3}, {}),
        (3, 2, {}, {}, {"drop_last": True}),
    ]
    both = ranks(_sizes, 2, cases)

    def of(number):
        return [each[number][0] for each in both]

    def told(number, text):
        return any(text in message for message in both[0][number][1])

    assert [len(ids) for *_, ids, _ in of(0)[0]] == [2, 2, 2]
    assert told(0, "2 x 2 rank(s) x 1 micro-batch(es) = 4 samples per optimizer step")
    assert counts_of(of(1), 0) == dict.fromkeys(range(8), 1)
    assert sum(counts_of(of(2), 0).values()) == 10
    assert set(counts_of(of(2), 0)) == set(range(9))
    assert len(of(3)[0]) == 3
    assert [ids for *_, ids, _ in of(4)[0]] == [[0, 2]] * 2
    assert [ids for *_, ids, _ in of(4)[1]] == [[1, 3]] * 2
    assert told(4, "overfit_batches=1 counts for each rank: 2 batches in all")
    assert told(5, "2 x 2 rank(s) x 3 micro-batch(es) = 12 samples per optimizer step")
    assert of(6) == [[], []]
    assert told(6, "drop_last leaves nothing to train on")


@pytest.mark.parametrize("what", ["5 is not a multiple of 2 ranks", "Tokens"])
def test_a_global_batch_that_does_not_divide_is_an_error(what):
    def refused(rank, world_size, port):
        tokens = DataLoader(Numbers(16), batch_sampler=Tokens([1] * 16, 4))
        data = tokens if what == "Tokens" else loader(10, 5)
        with pytest.raises(ConfigError, match=what):
            fit(rank, world_size, port, Learner(), loader=data, options={"batch_size": "global"})
        return True

    assert all(ranks(refused, 2))


# Combined loaders


def _combined(rank, world_size, port, mode, path, folder, sizes=(4, 12)):
    def make():
        return CombinedLoader(
            {"a": loader(sizes[0], 1, shuffle=True), "b": loader(sizes[1], 2, shuffle=True)}, mode
        )

    module = HookLearner({"train": make})
    callbacks = [] if path else [SaveAt(folder, "on_train_batch_end")]
    fit(rank, world_size, port, module, path, max_epochs=2, callbacks=callbacks)
    return module.seen


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_combined_loaders_and_their_resume(mode, tmp_path):
    sizes = {"max_size_cycle": (4, 24), "min_size": (4, 24), "max_size": (4, 24)}[mode]
    straight = ranks(_combined, 2, mode, None, tmp_path, sizes)
    steps = len(straight[0]) // 2
    assert steps == {"max_size_cycle": 6, "min_size": 2, "max_size": 6}[mode]
    for epoch in (0, 1):
        parts = {"a": [], "b": []}
        for seen in straight:
            for e, _, ids, _ in seen:
                if e == epoch:
                    for name, own in ids.items():
                        parts[name].append(own)
        a = [joined((parts["a"][k], parts["a"][k + steps])) for k in range(steps)]
        assert sorted(a[0] + a[1]) == list(range(4)), "a pass of the short loader"
        if mode == "max_size_cycle":
            assert sorted(a[2] + a[3]) == list(range(4))
            assert sorted(joined(parts["b"])) == list(range(24))
            assert [sorted(x) for x in a[:2]] != [sorted(x) for x in a[2:4]] or [
                sorted(x) for x in a[:2]
            ] != [sorted(x) for x in a[4:6]], "each pass has an order of its own"
        if mode == "max_size":
            assert a[2:] == [[]] * 4
    for done in (1, 3, steps, steps + 1, 2 * steps - 1):
        again = ranks(_combined, 2, mode, str(tmp_path / f"{done - 1:03d}.ckpt"), tmp_path, sizes)
        for seen, whole in zip(again, straight, strict=True):
            assert [s[2] for s in seen] == [s[2] for s in whole[done:]], f"after step {done}"


def test_combined_loaders_go_on_with_another_number_of_ranks(tmp_path):
    straight = ranks(_combined, 2, "max_size_cycle", None, tmp_path, (8, 24))
    again = ranks(_combined, 1, "max_size_cycle", str(tmp_path / "002.ckpt"), tmp_path, (8, 24))

    def b_of(runs, steps):
        return sorted(
            i for seen in runs for e, _, ids, _ in seen[:steps] if e == 0 for i in ids["b"]
        )

    assert b_of(straight, 3) + b_of(again, None) != []
    assert sorted(b_of(straight, 3) + b_of(again, None)) == list(range(24))


# Samplers without a length


class Endless(Sampler):
    """Never ends and has no length; one order for the whole run."""

    def __iter__(self):
        while True:
            yield from torch.randperm(16).tolist()


class Unsized(Sampler):
    def __iter__(self):
        return iter(torch.randperm(15).tolist())


def _unsized(rank, world_size, port, kind, path, folder, limits):
    torch.manual_seed(rank)
    module = HookLearner({"train": lambda: DataLoader(Numbers(16), batch_size=2, sampler=kind())})
    callbacks = [] if path else [SaveAt(folder, "on_train_batch_end")]
    fit(rank, world_size, port, module, path, callbacks=callbacks, **limits)
    return module.seen


@pytest.mark.parametrize(
    ("kind", "limits", "steps"),
    [(Endless, {"max_steps": 10, "max_epochs": -1}, 10), (Unsized, {"max_epochs": 2}, 8)],
)
def test_samplers_without_a_length(kind, limits, steps, tmp_path):
    straight = ranks(_unsized, 2, kind, None, tmp_path, limits)
    assert [len(seen) for seen in straight] == [steps, steps]
    first = counts_of([seen[:3] for seen in straight], 0)
    assert sum(first.values()) == len(first) == 12
    for done in (1, 3, 5):
        again = ranks(_unsized, 2, kind, str(tmp_path / f"{done - 1:03d}.ckpt"), tmp_path, limits)
        for seen, whole in zip(again, straight, strict=True):
            assert [s[2] for s in seen] == [s[2] for s in whole[done:]], f"after step {done}"


def _splits(rank, world_size, port, seed, flag):
    rows = Numbers(16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed + rank * (not flag)))
    module = Learner()
    data = DataLoader(Subset(rows, order[:12].tolist()), batch_size=2)
    fit(rank, world_size, port, module, loader=data)
    return module.seen


def test_a_split_that_differs_between_ranks_is_found():
    """Of the same length on each rank: once rows were trained that another rank validated."""

    def refused(rank, world_size, port):
        with pytest.raises(ConfigError, match=r"Subset.*differs between ranks.*rank\(s\) \[1\]"):
            _splits(rank, world_size, port, 3, False)
        return True

    assert all(ranks(refused, 2))
    seen = ranks(_splits, 2, 3, True)
    assert len(counts_of(seen, 0)) == 12, "the control: split alike"
