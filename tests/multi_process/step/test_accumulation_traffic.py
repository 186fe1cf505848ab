"""What is sent in an accumulation window, and what is left over at its end."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.logs import log_lines
from tests.support.spies import CollectiveSpy
from tests.support.trainers import lean, ranks, trainer
from tests.support.windows import InOrder, Tokens, fit_tokens, make_rows

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


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


class CountCallback(pl.Callback):
    """Collectives from one batch's end to the next one's: nothing that the loop does is left out."""

    def __init__(self):
        self.by_batch = []
        self.spy = None

    def on_train_batch_start(self, trainer, *_):
        if self.spy is None:
            self.spy = CollectiveSpy()
            self.spy.__enter__()

    def on_train_batch_end(self, trainer, *_):
        self.by_batch.append(dict(self.spy.calls))
        self.spy.calls.clear()

    def on_train_end(self, trainer, *_):
        self.spy.__exit__(None, None, None)


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
    reductions = [batch.get("all_reduce", 0) for batch in counter.by_batch]
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
        assert by_batch[1:3] == [{}, {}]
        assert by_batch[4:] == [{}, {}, {}, {"all_reduce": 1}]


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
    (window, rare), _ = ranks(_every, 2, "window")
    (every, often), _ = ranks(_every, 2, "every")
    assert len(window) == 3
    for a, b in zip(window, every, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-12, atol=1e-12)
    assert ["all_reduce" in batch for batch in often[1:]] == [True] * 4
    assert ["all_reduce" in batch for batch in rare[1:]] == [True, False, True, True], (
        "micro-batches 2, 4 and 5 end windows"
    )


def _leftover(rank, world_size, port, tail):
    module = Manual(4, context=False)
    data = torch.ones(6, 2, 4, dtype=torch.float64)  # a step after 4 of 6: 2 are left
    said = log_lines()
    t = trainer(
        world_size, port, lean(incomplete_window=tail), max_epochs=2, use_distributed_sampler=False
    )
    t.fit(module, DataLoader(data, batch_size=None))
    return [g.abs().sum().item() for g in module.gradients], said


def test_a_gradient_left_at_an_epochs_end_is_said_and_not_leaked():
    (dropped, said), _ = ranks(_leftover, 2, "step")
    (carried, silent), _ = ranks(_leftover, 2, "carry")
    assert any("2 micro-batch(es)" in line and "incomplete_window='carry'" in line for line in said)
    assert not any("micro-batch(es)" in line for line in silent)
    assert len(dropped) == len(carried) == 2
    assert dropped[0] == carried[0]
    assert dropped[1] < carried[1], "the second epoch's first step has 4 micro-batches, not 6"
