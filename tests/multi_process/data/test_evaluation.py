"""Evaluation: each sample once, the value of one device, and no rank left waiting."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp.errors import ConfigError, UnevenShardError
from tests.support.logs import log_lines
from tests.support.sampling import Learner, Numbers, ValHookLearner, loader
from tests.support.trainers import ddp, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


def _strategy(kind, options):
    if kind == "ddp":
        return ddp()
    return lean(**options)


class Evaluates(Learner):
    """Logs a float, and a count, and updates a metric."""

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch["i"].tolist())
        self.log("mean", batch["i"].double().mean(), sync_dist=True)
        self.log("one", 1.0, sync_dist=True)
        self.log("loss", self.loss(batch), sync_dist=True)


def _validate(rank, world_size, port, cases, kind="lean", options=None):
    results = []
    for n, size in cases:
        module = Evaluates()
        t = trainer(world_size, port, _strategy(kind, options or {}))
        (metrics,) = t.validate(module, loader(n, size), verbose=False)
        results.append((metrics, module.evaluated))
    return results


CASES = [(7, 2), (5, 2), (23, 4), (8, 2), (3, 1), (4, 1), (9, 8), (6, 5)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_are_those_of_one_device(world_size):
    alone = ranks(_validate, 1, CASES)[0]
    for results in ranks(_validate, world_size, CASES):
        for case, (metrics, _), (want, _) in zip(CASES, results, alone, strict=True):
            assert metrics["one"] == 1.0, case
            assert metrics["mean"] == pytest.approx(want["mean"], abs=1e-6), case
            assert metrics["loss"] == pytest.approx(want["loss"], abs=1e-6), case


def test_each_sample_is_evaluated_once_in_equal_steps():
    both = ranks(_validate, 2, CASES)
    for number, (n, size) in enumerate(CASES):
        evaluated = [results[number][1] for results in both]
        assert sorted(i for batches in evaluated for b in batches for i in b) == list(range(n))
        if size > 1:
            assert len({len(batches) for batches in evaluated}) == 1


def test_the_controls_ddp_and_pad_count_samples_twice():
    for kind, options in (("ddp", {}), ("lean", {"eval_padding": "pad"})):
        results = ranks(_validate, 2, [(7, 2)], kind, options)
        assert sum(len(b) for own in results for b in own[0][1]) == 8
        assert results[0][0][0]["mean"] != pytest.approx(3.0)


def _fit_validates(rank, world_size, port):
    module = ValHookLearner({"train": lambda: loader(8, 2), "val": lambda: loader(7, 2)})
    t = trainer(world_size, port, lean(), num_sanity_val_steps=0)
    t.fit(module)
    return float(t.callback_metrics["mean"])


def test_validation_inside_fit_is_exact_too():
    assert ranks(_fit_validates, 2) == [3.0, 3.0]


class Digits(pl.LightningModule):
    """A fixed, badly trained classifier; what matters is how many it gets right."""

    def __init__(self, metric):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Linear(64, 10)
        with torch.no_grad():
            self.net.weight.copy_(torch.randn(10, 64, generator=generator))
        self.accuracy = metric

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy.update(self.net(x), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)


def _digits(rank, world_size, port, kind, size):
    x, y = load_digits(return_X_y=True)
    held_out = slice(1400, None)  # 397 scans: odd, and prime
    data = TensorDataset(torch.tensor(x[held_out]).float(), torch.tensor(y[held_out]))
    values = {}
    for average in ("micro", "macro"):
        module = Digits(MulticlassAccuracy(10, average=average))
        t = trainer(world_size, port, _strategy(kind, {}))
        (metrics,) = t.test(module, DataLoader(data, batch_size=size), verbose=False)
        values[average] = float(metrics["accuracy"]).hex()
    return len(data), values


@pytest.mark.parametrize("size", [32, 1])
def test_accuracy_on_digits_is_the_same_to_the_last_bit(size):
    (n, want), *_ = ranks(_digits, 1, "lean", size)
    assert n % 2
    assert n % 3
    for world_size in (2, 3):
        for _, values in ranks(_digits, world_size, "lean", size):
            assert values == want, world_size


def test_the_control_ddp_gets_another_accuracy():
    want = ranks(_digits, 1, "lean", 32)[0][1]
    assert any(ranks(_digits, world_size, "ddp", 32)[0][1] != want for world_size in (2, 3))


class Gathers(Learner):
    def on_validation_epoch_start(self):
        self.rows = []

    def validation_step(self, batch, batch_idx):
        self.rows.append(batch["i"].double() * 10)

    def on_validation_epoch_end(self):
        rows = torch.cat(self.rows)
        strategy = self.trainer.strategy
        self.padded = self.all_gather(rows)
        self.exact = strategy.gather_ragged(rows)
        self.columns = strategy.gather_ragged(rows.unsqueeze(1).repeat(1, 3))
        self.mean = strategy.reduce(torch.tensor(self.global_rank * 1), reduce_op="mean")


def _gathers(rank, world_size, port, cases, options):
    results = []
    for n, size, shuffle, limit in cases:
        module = Gathers()
        t = trainer(world_size, port, lean(**options), limit_val_batches=limit)
        t.validate(module, loader(n, size, shuffle=shuffle), verbose=False)
        results.append((module.padded, module.exact.tolist(), module.columns.tolist(), module.mean))
    return results


def test_ragged_rows_come_back_exactly_and_in_order():
    cases = [
        (5, 2, False, 1.0),
        (7, 3, True, 1.0),
        (6, 2, True, 1.0),
        (11, 2, False, 2),
        (4, 1, True, 1.0),
    ]
    for world_size in (1, 2, 3):
        for results in ranks(_gathers, world_size, cases, {}):
            for (n, size, _, limit), (padded, exact, columns, mean) in zip(
                cases, results, strict=True
            ):
                seen = n if limit == 1.0 else min(n, limit * size * world_size)
                assert exact == [10.0 * i for i in range(seen)]
                assert columns == [[10.0 * i] * 3 for i in range(seen)]
                assert padded.shape[:1] == (world_size,) or world_size == 1
                assert float(mean) == (world_size - 1) / 2


def test_padded_evaluation_still_gathers_each_sample_once():
    for results in ranks(_gathers, 2, [(5, 2, False, 1.0)], {"eval_padding": "pad"}):
        assert results[0][1] == [10.0 * i for i in range(5)]


class Running(Learner):
    """Shows a metric's running value over ranks in each step."""

    def __init__(self, computes=False):
        super().__init__()
        self.metric, self.computes = MeanMetric(dist_sync_on_step=True), computes

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(float(self.metric(batch["i"].double())))
        if self.computes:
            self.metric.compute()

    def on_validation_epoch_end(self):
        self.log("mean", self.metric.compute())
        self.metric.reset()


def _running(rank, world_size, port, n, computes):
    module = Running(computes)
    t = trainer(world_size, port, lean())
    (metrics,) = t.validate(module, loader(n, 1), verbose=False)
    return module.evaluated, metrics["mean"], module.metric.dist_sync_on_step


def test_a_metric_that_synchronises_in_each_step_of_uneven_numbers_waits_for_the_epochs_end():
    results = ranks(_running, 2, 5, False, timeout_s=30)
    assert [seen for seen, *_ in results] == [[0.0, 2.0, 4.0], [1.0, 3.0]]
    assert [rest for _, *rest in results] == [[2.0, True]] * 2
    even = ranks(_running, 2, 4, False)
    assert [seen for seen, *_ in even] == [[0.5, 2.5]] * 2, "the control: over ranks"

    def refused(rank, world_size, port):
        with pytest.raises(UnevenShardError, match=r"torch\.distributed\."):
            _running(rank, world_size, port, 5, True)
        return True

    assert all(ranks(refused, 2, timeout_s=30)), "a user's own call to compute() in the step"


class Chatty(Learner):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def validation_step(self, batch, batch_idx):
        if self.how == "log":
            self.log("step", batch["i"].double().mean(), sync_dist=True, on_step=True)
        else:
            self.all_gather(batch["i"])


def _chatty(rank, world_size, port, how, n, size):
    module = Chatty(how)
    trainer(world_size, port, lean()).validate(module, loader(n, size), verbose=False)
    return "went through"


@pytest.mark.parametrize("how", ["log", "gather"])
def test_a_collective_in_a_step_that_not_all_make_is_an_error_on_all(how):
    def refused(rank, world_size, port):
        with pytest.raises(UnevenShardError, match="on_epoch=True"):
            _chatty(rank, world_size, port, how, 5, 1)
        return True

    assert ranks(refused, 2, timeout_s=30) == [True, True]
    assert ranks(_chatty, 2, how, 6, 1) == ["went through"] * 2
    assert ranks(_chatty, 2, how, 5, 2) == ["went through"] * 2


def _small(rank, world_size, port, stage, options):
    messages = log_lines()
    module = Learner()
    t = trainer(world_size, port, lean(**options), max_epochs=2)
    if stage == "fit":
        t.fit(module, loader(3, 2))
        seen = [ids for *_, ids, _ in module.seen]
    elif stage == "validate":
        t.validate(module, loader(3, 2), verbose=False)
        seen = module.evaluated
    else:
        seen = [batch.tolist() for batch in t.predict(module, loader(3, 2))]
    return seen, messages


def test_fewer_samples_than_ranks():
    fit = ranks(_small, 4, "fit", {})
    assert {i for seen, _ in fit for batch in seen for i in batch} == {0, 1, 2}
    assert len({len(seen) for seen, _ in fit}) == 1
    assert any("3 sample(s) to train on for 4 ranks" in m for m in fit[0][1])
    validate = ranks(_small, 4, "validate", {})
    assert [seen for seen, _ in validate] == [[[0]], [[1]], [[2]], [[0]]]
    assert any("count 1 sample(s) twice" in m for m in validate[0][1])
    predict = ranks(_small, 4, "predict", {})
    assert [seen for seen, _ in predict] == [[[0]], [[1]], [[2]], []]


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_fewer_samples_than_ranks_can_be_an_error(stage):
    def refused(rank, world_size, port):
        with pytest.raises(ConfigError):
            _small(rank, world_size, port, stage, {"strict_data": True})
        return True

    assert all(ranks(refused, 4))


def _own_batches(rank, world_size, port, batches):
    results = []
    for each in batches:
        module = Evaluates()
        t = trainer(world_size, port, lean())
        (metrics,) = t.validate(module, DataLoader(Numbers(40), batch_sampler=each), verbose=False)
        results.append((module.evaluated, metrics["mean"]))
    return results


class Lengths:
    """A batch sampler with a constructor of its own: batches by number of tokens."""

    def __init__(self, batches, max_tokens):
        self.batches, self.max_tokens = batches, max_tokens

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_batches_of_a_users_batch_sampler_are_evaluated_once():
    shapes = [
        [[0, 1, 2], [3], [4, 5], [6, 7], [8, 9, 10]],
        [[0, 1], [2, 3], [4]],
        [[0], [1], [2]],
        [[i] for i in range(4)],
        [[0, 1, 2, 3]],
    ]
    samplers = [Lengths(batches, 99) for batches in shapes]
    for world_size in (2, 3):
        both = ranks(_own_batches, world_size, samplers)
        for number, batches in enumerate(shapes):
            units = [i for batch in batches for i in batch]
            mine = [results[number][0] for results in both]
            assert sorted(i for own in mine for b in own for i in b) == units
            longest = max(map(len, batches))
            assert all(len(b) <= longest for own in mine for b in own)
            if longest > 1:
                assert len({len(own) for own in mine}) == 1
            mean = both[0][number][1]
            assert mean == pytest.approx(sum(units) / len(units), abs=1e-6)
