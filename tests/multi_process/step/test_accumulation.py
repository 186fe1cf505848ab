"""Accumulation windows at Trainer level: scale, weights, traffic, tails, schedules, checkpoints."""

from __future__ import annotations

import csv
import os
import random

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dp.engine.wires.shared_memory import SharedMemory
from lightning_dp.errors import ConfigError
from tests.support.logs import log_lines
from tests.support.ranks import RankError
from tests.support.trainers import ddp, lean, ranks, trainer

pytestmark = pytest.mark.multi_process


class Unit(pl.LightningModule):
    """Every micro-batch's gradient is 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.w * 1.0

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.w.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _unit(rank, world_size, port, batches, window, strategy, options, epochs=1):
    module = Unit()
    data = DataLoader(torch.zeros(batches * world_size, 1), batch_size=1)
    made = lean(**options) if strategy == "lean" else ddp()
    t = trainer(world_size, port, made, accumulate_grad_batches=window, max_epochs=epochs)
    t.fit(module, data)
    return module.seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("batches", "window", "want"), [(5, 4, [1.0, 1.0]), (3, 8, [1.0])])
def test_a_short_window_has_the_right_scale(world_size, batches, window, want):
    assert ranks(_unit, world_size, batches, window, "lean", {}) == [want] * world_size


@pytest.mark.parametrize(("batches", "window", "want"), [(5, 4, [1.0, 0.25]), (3, 8, [0.375])])
def test_control_ddp_scales_a_short_window_wrongly(batches, window, want):
    assert ranks(_unit, 2, batches, window, "ddp", {}) == [want] * 2


@pytest.mark.parametrize(
    ("tail", "steps"),
    [("step", 4), ("carry", 2), ("drop", 2)],  # 2 epochs of 5 micro-batches, window 4
)
def test_tails(tail, steps):
    for seen in ranks(_unit, 2, 5, 4, "lean", {"tail": tail}, 2):
        assert seen == [1.0] * steps


class Tokens(pl.LightningModule):
    """A token-mean loss over rows of very different length; float64."""

    def __init__(self, rows, lr=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.rows = rows
        self.lr = lr
        self.gradients = []
        self.losses = []

    def loss(self, rows):
        return torch.cat([self.net(row).flatten() for row in rows]).square().mean()

    def training_step(self, batch, batch_idx):
        rows = [self.rows[int(i)] for i in batch]
        return {"loss": self.loss(rows), "loss_weight": sum(len(row) for row in rows)}

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append([p.grad.clone() for p in self.parameters()])
        totals = getattr(self.trainer.strategy, "window_totals", None)
        self.losses.append(totals.loss if totals is not None else None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_rows(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in lengths]


class InOrder(torch.utils.data.Sampler):
    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def fit_tokens(world_size, rank, port, rows, window, options=None, steps=None, **kwargs):
    """Each rank reads rows rank, rank + W, ...: the sampling of data is not under test here."""
    module = Tokens(rows)
    mine = list(range(rank, len(rows), world_size))
    data = DataLoader(range(len(rows)), batch_size=1, sampler=InOrder(mine))
    strategy = kwargs.pop("strategy", None) or lean(**(options or {}))
    t = trainer(
        world_size,
        port,
        strategy,
        accumulate_grad_batches=window,
        use_distributed_sampler=False,
        **kwargs,
    )
    t.fit(module, data)
    return module


def _tokens(rank, world_size, port, lengths, window, kind="lean"):
    rows = make_rows(lengths)
    strategy = None if kind == "lean" else ddp()
    module = fit_tokens(world_size, rank, port, rows, window, strategy=strategy)
    # what one process computes on the whole batch
    reference = Tokens(rows)
    for step, got in enumerate(module.gradients):
        per_step = window * world_size
        whole = rows[step * per_step : (step + 1) * per_step]
        reference.zero_grad()
        loss = reference.loss(whole)
        loss.backward()
        for p, g in zip(reference.parameters(), got, strict=True):
            torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=1e-12)
        if kind == "lean":
            assert module.losses[step] == pytest.approx(float(loss), rel=1e-12)
        with torch.no_grad():
            for p in reference.parameters():
                p.sub_(0.1 * p.grad)
    return len(module.gradients)


def test_token_weights_over_ranks_and_micro_batches():
    assert ranks(_tokens, 2, [5, 120, 17, 33], 2) == [1, 1]


def test_control_ddp_averages_means():
    with pytest.raises(RankError, match="not close"):
        ranks(_tokens, 2, [5, 120, 17, 33], 2, "ddp")


@pytest.mark.parametrize("seed", range(6))
def test_random_token_counts_windows_and_ranks(seed):
    draw = random.Random(seed)
    world_size, window = draw.randint(1, 3), draw.randint(1, 5)
    # whole number of micro-batches a rank, windows that need not fill
    lengths = [draw.randint(1, 60) for _ in range(world_size * draw.randint(2, 9))]
    ranks(_tokens, world_size, lengths, window)


class Padded(pl.LightningModule):
    """Row ``i`` of the data is ``lengths[i]`` tokens; the loss is a mean over them, 0 / 0 for none."""

    def __init__(self, lengths, finite):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 5).double()
        self.lengths, self.finite = lengths, finite
        self.gradients, self.losses = [], []

    def training_step(self, batch, batch_idx):
        there = torch.arange(6) < self.lengths[int(batch)]
        each = self.net(torch.ones(6, 3).double()).square().mean(1)
        loss = (each * there).sum() / there.sum().clamp(min=int(self.finite))
        return {"loss": loss, "loss_weight": there.sum()}

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(
            [None if p.grad is None else p.grad.clone() for p in self.parameters()]
        )
        self.losses.append(self.trainer.strategy.window_totals.loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _padded(rank, world_size, port, lengths, finite):
    said = log_lines("lightning_dp.step.losses")
    module = Padded(lengths, finite)
    mine = list(range(rank, len(lengths), world_size))
    data = DataLoader(range(len(lengths)), batch_size=1, sampler=InOrder(mine))
    t = trainer(world_size, port, lean(), accumulate_grad_batches=2, use_distributed_sampler=False)
    t.fit(module, data)
    finite = all(bool(p.isfinite().all()) for p in module.parameters())
    zero = [all(g is None or not g.any() for g in step) for step in module.gradients]
    return finite, zero, module.losses, [text for text in said if "weight 0" in text]


@pytest.mark.parametrize("finite", [False, True])
def test_a_window_in_which_nothing_counts_changes_nothing_and_is_said_once(finite):
    """Windows of two ranks and two micro-batches: one row empty, all empty twice, none empty."""
    lengths = [4, 0, 2, 3] + [0] * 8 + [1, 2, 3, 4]
    first, second = ranks(_padded, 2, lengths, finite)
    for result in (first, second):
        assert result[0]
        assert result[1] == [False, True, True, False]
    assert first[2] == pytest.approx(second[2], nan_ok=True)
    assert [loss == loss for loss in first[2]] == [True, False, False, True]
    (said,) = first[3]
    assert "step 1:" in said
    assert second[3] == []


class Manual(pl.LightningModule):
    def __init__(self, per_step, context):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.net = nn.Linear(4, 1).double()
        self.per_step, self.context = per_step, context
        self.gradients = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.per_step == 0
        loss = self.net(batch).square().mean()
        if self.context and not last:
            with self.trainer.strategy.accumulate():
                self.manual_backward(loss)
        else:
            self.manual_backward(loss)
        if last:
            optimizer.step()
            self.gradients.append(self.net.weight.grad.clone())
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountCollectives:
    """Counts every collective between two optimizer steps' batches; a sum in memory is an all-reduce."""

    NAMES = (
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "broadcast",
        "broadcast_object_list",
        "barrier",
    )

    def __enter__(self):
        self.calls = []
        places = [(dist, name, name) for name in self.NAMES]
        places.append((SharedMemory, "start", "all_reduce"))
        self.kept = [
            (owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places
        ]
        for (owner, attribute, name), (_, _, original) in zip(places, self.kept, strict=True):

            def spy(*args, _name=name, _original=original, **kwargs):
                self.calls.append(_name)
                return _original(*args, **kwargs)

            setattr(owner, attribute, spy)
        return self

    def __exit__(self, *_):
        for owner, attribute, original in self.kept:
            setattr(owner, attribute, original)


class CountCallback(pl.Callback):
    """Collectives from one batch's end to the next one's: nothing that the loop does is left out."""

    def __init__(self):
        self.by_batch = []
        self.spy = None

    def on_train_batch_start(self, trainer, *_):
        if self.spy is None:
            self.spy = CountCollectives()
            self.spy.__enter__()

    def on_train_batch_end(self, trainer, *_):
        self.by_batch.append(list(self.spy.calls))
        self.spy.calls.clear()

    def on_train_end(self, trainer, *_):
        self.spy.__exit__()


def _manual(rank, world_size, port, options, context):
    data = torch.randn(8, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    module = Manual(4, context)
    counter = CountCallback()
    t = trainer(
        world_size,
        port,
        lean(check_replicas_every_n_steps=0, **options),
        callbacks=[counter],
        use_distributed_sampler=False,
    )
    t.fit(module, DataLoader(data, batch_size=None))
    reductions = [sum(c == "all_reduce" for c in batch) for batch in counter.by_batch]
    return reductions, [g.tolist() for g in module.gradients]


def test_manual_optimization_reduces_once_a_step():
    """8 micro-batches, 2 steps: ddp reduces 8 times."""
    each, _ = zip(*ranks(_manual, 2, {}, False), strict=True)
    on_step = ranks(_manual, 2, {"manual_sync": "on_step"}, False)
    context = ranks(_manual, 2, {}, True)
    assert sum(each[0]) == 8
    for reductions, gradients in (*on_step, *context):
        assert reductions == [0, 0, 0, 1, 0, 0, 0, 1]
        torch.testing.assert_close(torch.tensor(gradients), torch.tensor(on_step[0][1]))


def _automatic_counts(rank, world_size, port):
    counter = CountCallback()
    module = Tokens(make_rows([3] * 16))
    data = DataLoader(range(16), batch_size=1, sampler=InOrder(range(rank, 16, 2)))
    strategy = lean(check_replicas_every_n_steps=0)
    t = trainer(
        world_size,
        port,
        strategy,
        accumulate_grad_batches=4,
        use_distributed_sampler=False,
        callbacks=[counter],
    )
    t.fit(module, data)
    return counter.by_batch


def test_automatic_optimization_sends_buckets_and_nothing_else():
    """8 micro-batches, 2 steps. ddp: 8 blocking broadcasts besides its buckets."""
    for by_batch in ranks(_automatic_counts, 2):
        # the first step also agrees on the order, and each epoch looks for new parameters
        assert by_batch[1:3] == [[], []]
        assert by_batch[4:] == [[], [], [], ["all_reduce"]]


def _frequency(rank, world_size, port, frequency):
    class Scheduled(Unit):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
            return [optimizer], [
                {"scheduler": self.scheduler, "interval": "step", "frequency": frequency}
            ]

    module = Scheduled()
    t = trainer(world_size, port, lean(), accumulate_grad_batches=4)
    t.fit(module, DataLoader(torch.zeros(24 * world_size, 1), batch_size=1))
    return module.scheduler.last_epoch


@pytest.mark.parametrize(("frequency", "want"), [(1, 6), (2, 3), (4, 1), (8, 0)])
def test_scheduler_frequency_counts_optimizer_steps(frequency, want):
    """6 optimizer steps; ddp gives 6, 6, 6 and 3."""
    assert ranks(_frequency, 1, frequency) == [want]


def _estimate(rank, world_size, port, schedule, tail):
    class Asks(Unit):
        def configure_optimizers(self):
            self.estimated = int(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    module = Asks()
    callbacks = [GradientAccumulationScheduler(schedule)] if schedule else []
    t = trainer(
        world_size,
        port,
        lean(tail=tail),
        callbacks=callbacks,
        max_epochs=4,
        accumulate_grad_batches=1 if schedule else 3,
    )
    t.fit(module, DataLoader(torch.zeros(8 * world_size, 1), batch_size=1))
    plain = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
    assert isinstance(type(plain).estimated_stepping_batches, property)
    return module.estimated, t.global_step


@pytest.mark.parametrize("tail", ["step", "carry", "drop"])
@pytest.mark.parametrize("schedule", [None, {0: 4, 2: 2}, {0: 3, 1: 5}])
def test_estimated_steps_are_the_steps_made(schedule, tail):
    for estimated, made in ranks(_estimate, 2, schedule, tail):
        assert estimated == made


def _none(rank, world_size, port):
    class Sometimes(Tokens):
        def training_step(self, batch, batch_idx):
            if rank == 1 and batch_idx == 0:
                return None
            return super().training_step(batch, batch_idx)

    rows = make_rows([4, 9, 2, 5])
    module = Sometimes(rows)
    data = DataLoader(range(4), batch_size=1, sampler=InOrder(range(rank, 4, world_size)))
    t = trainer(world_size, port, lean(), accumulate_grad_batches=2, use_distributed_sampler=False)
    t.fit(module, data)
    whole = [rows[0], rows[2], rows[3]]  # rank 1's first micro-batch counts zero
    reference = Tokens(rows)
    reference.loss(whole).backward()
    for p, g in zip(reference.parameters(), module.gradients[0], strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=1e-12)


def test_a_micro_batch_without_a_loss_counts_zero():
    ranks(_none, 2)


class Stop(pl.Callback):
    def __init__(self, after, path):
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
            trainer.limit_train_batches = 0


def _run_window(rank, world_size, port, rows, stop_after, path, resume, out):
    """Global micro-batches of 6 rows; window 4; 3 windows. Saves after ``stop_after`` micro-batches."""
    per_rank = 6 // world_size
    groups = [list(range(i, i + 6)) for i in range(0, len(rows), 6)]
    mine = [g[rank * per_rank : (rank + 1) * per_rank] for g in groups]
    if resume:
        mine = mine[stop_after:]
    module = Tokens(rows)
    done = stop_after if resume else 0

    class Rest(Dataset):
        def __len__(self):
            return len(groups)

        def __getitem__(self, index):
            return torch.tensor(mine[index - done])

    class Tail(torch.utils.data.Sampler):
        # a loader that resumes by itself, so that only the window is under test
        def __iter__(self):
            return iter(range(done, len(groups)))

        def __len__(self):
            return len(groups)

    data = DataLoader(Rest(), batch_size=None, sampler=Tail())
    callbacks = [] if resume else [Stop(stop_after, path)]
    t = trainer(
        world_size,
        port,
        lean(),
        accumulate_grad_batches=4,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    t.fit(module, data, ckpt_path=path if resume else None)
    return [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 6])
def test_a_checkpoint_inside_a_window_resumes_on_any_number_of_ranks(stop_after, tmp_path):
    rows = make_rows([random.Random(1).randint(1, 30) for _ in range(6 * 12)])
    whole = ranks(_run_window, 2, rows, 10**6, "", False, None)[0]
    path = str(tmp_path / "inside.ckpt")
    ranks(_run_window, 2, rows, stop_after, path, False, None)
    torch.load(path, weights_only=True)
    for world_size in (1, 2, 3):
        resumed = ranks(
            _run_window,
            world_size,
            rows,
            stop_after,
            path,
            True,
            None,
        )
        for weights in resumed:
            for got, want in zip(weights, whole, strict=True):
                torch.testing.assert_close(
                    torch.tensor(got), torch.tensor(want), rtol=1e-10, atol=1e-10
                )


def _global_batch(rank, world_size, port, batch, loader_batch):
    module = Unit()
    t = trainer(world_size, port, lean(batch=batch))
    t.fit(module, DataLoader(torch.zeros(48, 1), batch_size=loader_batch))
    return t.accumulate_grad_batches, t.global_step, module.seen


def test_a_global_batch_sets_the_accumulation_before_optimizers_are_configured():
    batch = {"global": 24, "micro": 3, "accumulate": "auto"}
    for steps, made, seen in ranks(_global_batch, 2, batch, 3):
        assert (steps, made) == (4, 2)
        assert seen == [1.0, 1.0]


def test_a_loader_with_another_batch_size_is_a_clear_error():
    batch = {"global": 24, "micro": 3}
    for traceback in ranks(_refused, 2, batch):
        assert "batch_size is 4" in traceback
        assert "batch.micro=3" in traceback


def _refused(rank, world_size, port, batch):
    with pytest.raises(ConfigError) as caught:
        _global_batch(rank, world_size, port, batch, 4)
    return str(caught.value)


def _monitor(rank, world_size, port, root):
    from lightning.pytorch.loggers import CSVLogger

    from lightning_dp import LeanDDPMonitor

    rows = make_rows([5, 40, 9, 2, 30, 7, 11, 3])
    logger = CSVLogger(root, name="", version="")
    module = fit_tokens(
        world_size,
        rank,
        port,
        rows,
        2,
        root=root,
        logger=logger,
        callbacks=[LeanDDPMonitor()],
        log_every_n_steps=1,
    )
    return module.losses


def test_the_monitor_logs_the_windows_mean_loss_and_its_cost(tmp_path):
    losses = ranks(_monitor, 2, str(tmp_path))[0]
    with open(tmp_path / "metrics.csv") as f:
        logged = [row for row in csv.DictReader(f) if row.get("lean/loss")]
    assert [float(row["lean/loss"]) for row in logged] == pytest.approx(losses)
    assert [float(row["lean/window_micro_batches"]) for row in logged] == [4.0, 4.0]
    assert [float(row["lean/window_weight"]) for row in logged] == [56.0, 51.0]
    for name in ("exposed_ms", "hidden_pct", "bytes", "bus_gb_s", "straggler_ms", "backward_ms"):
        assert float(logged[-1][f"lean/{name}"]) >= 0


def _every(rank, world_size, port, accum_sync):
    rows = make_rows([5, 40, 9, 2, 30, 7, 11, 3, 8, 1])
    counter = CountCallback()
    module = fit_tokens(
        world_size,
        rank,
        port,
        rows,
        2,
        {"accum_sync": accum_sync, "check_replicas_every_n_steps": 0},
        callbacks=[counter],
    )
    return [[g.tolist() for g in step] for step in module.gradients], counter.by_batch


def test_reducing_every_micro_batch_gives_the_same_gradients():
    (window, _), _ = ranks(_every, 2, "window")
    (every, calls), _ = ranks(_every, 2, "every")
    for a, b in zip(window, every, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-12, atol=1e-12)
    assert all("all_reduce" in batch for batch in calls[1:])


def _boundary(rank, world_size, port, path):
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(path)
                self.at_once = os.path.exists(path)

    saves = Saves()
    rows = make_rows([5] * 12)
    fit_tokens(world_size, rank, port, rows, 4, {"mid_window": "boundary"}, callbacks=[saves])
    return saves.at_once


def test_a_save_inside_a_window_can_wait_for_the_boundary(tmp_path):
    path = str(tmp_path / "later.ckpt")
    assert ranks(_boundary, 2, path) == [False, False]
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 1
    assert "window" not in saved.get("lean_ddp", {})


def _skipped(rank, world_size, port):
    from lightning.pytorch.plugins import MixedPrecision

    class Overflows(Unit):
        def training_step(self, batch, batch_idx):
            return self.w * (float("inf") if batch_idx == 1 else 1.0)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    module = Overflows()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    t = trainer(world_size, port, lean(), plugins=[plugin])
    t.fit(module, DataLoader(torch.zeros(4 * world_size, 1), batch_size=1))
    return module.scheduler.last_epoch


def test_a_step_skipped_by_the_gradient_scaler_does_not_advance_the_scheduler():
    assert ranks(_skipped, 2) == [3, 3]


def _leftover(rank, world_size, port, tail):
    module = Manual(4, context=False)
    data = torch.ones(6, 2, 4, dtype=torch.float64)  # a step after 4 of 6: 2 are left
    said = log_lines()
    t = trainer(world_size, port, lean(tail=tail), max_epochs=2, use_distributed_sampler=False)
    t.fit(module, DataLoader(data, batch_size=None))
    return [g.abs().sum().item() for g in module.gradients], said


def test_a_gradient_left_at_an_epochs_end_is_said_and_not_leaked():
    (dropped, said), _ = ranks(_leftover, 2, "step")
    (carried, silent), _ = ranks(_leftover, 2, "carry")
    assert any("2 micro-batch(es)" in line and "tail='carry'" in line for line in said)
    assert not any("micro-batch(es)" in line for line in silent)
    assert len(dropped) == len(carried) == 2
    assert dropped[0] == carried[0]
    assert dropped[1] < carried[1], "the second epoch's first step has 4 micro-batches, not 6"


def _misfits(rank, world_size, port):
    class Validates(Tokens):
        def validation_step(self, batch, batch_idx):
            pass

    rows = make_rows([3] * 12)
    module = Validates(rows)
    order = InOrder(range(rank, 12, world_size))
    said = log_lines()
    t = trainer(
        world_size,
        port,
        lean(),
        accumulate_grad_batches=4,
        val_check_interval=3,
        use_distributed_sampler=False,
    )
    t.fit(module, DataLoader(range(12), batch_size=1, sampler=order), DataLoader(range(2)))
    t = trainer(world_size, port, lean(), accumulate_grad_batches=8, use_distributed_sampler=False)
    t.fit(Tokens(rows), DataLoader(range(12), batch_size=1, sampler=order))
    return said


def test_settings_that_cut_windows_are_said_at_the_start():
    said = ranks(_misfits, 2)[0]
    assert any("val_check_interval=3" in line for line in said)
    assert any("fewer than accumulate_grad_batches=8" in line for line in said)


def _plain_loader(rank, world_size, port, rows, stop_after, path, resume):
    """The user's own shuffled loader; sharding and resuming are ours. 6 rows a global micro-batch."""
    module = Tokens(rows)
    data = DataLoader(range(len(rows)), batch_size=6 // world_size, shuffle=True)
    os.environ["PL_GLOBAL_SEED"] = "5"
    t = trainer(
        world_size,
        port,
        lean(),
        accumulate_grad_batches=4,
        max_epochs=2,
        callbacks=[] if resume else [Stop(stop_after, path)],
    )
    t.fit(module, data, ckpt_path=path if resume else None)
    return [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 8])
def test_resume_inside_a_window_with_the_users_own_loader(stop_after, tmp_path):
    draw = random.Random(2)
    rows = make_rows(
        [draw.randint(1, 30) for _ in range(54)]
    )  # 9 micro-batches: the last window has 1
    whole = ranks(_plain_loader, 2, rows, 10**6, "", False)[0]
    path = str(tmp_path / "inside.ckpt")
    ranks(_plain_loader, 2, rows, stop_after, path, False)
    for world_size in (1, 2, 3):
        for weights in ranks(_plain_loader, world_size, rows, stop_after, path, True):
            for got, want in zip(weights, whole, strict=True):
                torch.testing.assert_close(
                    torch.tensor(got), torch.tensor(want), rtol=1e-10, atol=1e-10
                )
