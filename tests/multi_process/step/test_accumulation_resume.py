"""Checkpoints inside an accumulation window."""

from __future__ import annotations

import os
import random

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.trainers import lean, ranks, trainer
from tests.support.windows import Tokens, fit_tokens, make_rows

pytestmark = pytest.mark.multi_process


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
