"""Accumulation windows at Trainer level: scale, weights, tails."""

from __future__ import annotations

import csv
import random

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support import grounds
from tests.support.logs import log_lines
from tests.support.ranks import RankError
from tests.support.trainers import ddp, lean, ranks, trainer
from tests.support.windows import InOrder, Tokens, Unit, fit_tokens, make_rows

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


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
    for seen in ranks(_unit, 2, 5, 4, "lean", {"incomplete_window": tail}, 2):
        assert seen == [1.0] * steps


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
    steps = -(-len(lengths) // (world_size * window))
    assert ranks(_tokens, world_size, lengths, window) == [steps] * world_size


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
    if grounds.CURRENT is grounds.CPU:  # a GPU's host does not wait to learn what a weight on it is
        (said,) = first[3]
        assert "step 1:" in said
    assert second[3] == []


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
    cost = {
        name.removeprefix("lean/"): float(n) for name, n in logged[-1].items() if "lean/" in name
    }
    weights = sum(p.numel() * p.element_size() for p in Tokens([]).parameters())
    assert weights < cost["bytes"] < weights + 250, "and flags, and the control block"
    assert cost["backward_ms"] > 0
    assert cost["bus_gb_s"] > 0
    assert cost["exposed_ms"] >= 0
    assert 0 <= cost["hidden_pct"] <= 100
    assert 0 <= cost["straggler_ms"] < 1e3
