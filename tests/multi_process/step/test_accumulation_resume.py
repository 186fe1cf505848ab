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

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class SavesInside(pl.Callback):
    """A checkpoint after each of these micro-batches of the first epoch."""

    def __init__(self, folder, after):
        self.folder, self.after = folder, after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx + 1 in self.after:
            trainer.save_checkpoint(self.folder / f"{batch_idx + 1}.ckpt")


def own_loader(rank, world_size, port, rows, done, callbacks, path):
    """A loader that resumes by itself, so that only the window is under test. 3 windows of 4 x 6 rows."""
    per_rank = 6 // world_size
    mine = [list(range(i, i + 6))[rank * per_rank :][:per_rank] for i in range(0, len(rows), 6)]

    class Batches(Dataset):
        def __len__(self):
            return len(mine)

        def __getitem__(self, index):
            return torch.tensor(mine[index])

    class Rest(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(done, len(mine)))

        def __len__(self):
            return len(mine)

    module = Tokens(rows)
    data = DataLoader(Batches(), batch_size=None, sampler=Rest())
    t = trainer(
        world_size,
        port,
        lean(),
        accumulate_grad_batches=4,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    t.fit(module, data, ckpt_path=path)
    return [p.tolist() for p in module.parameters()]


def shuffled_loader(rank, world_size, port, rows, done, callbacks, path):
    """The user's own loader; sharding and resuming are ours. 9 micro-batches: the last window has 1."""
    module = Tokens(rows)
    data = DataLoader(range(len(rows)), batch_size=6 // world_size, shuffle=True)
    os.environ["PL_GLOBAL_SEED"] = "5"
    t = trainer(
        world_size, port, lean(), accumulate_grad_batches=4, max_epochs=2, callbacks=callbacks
    )
    t.fit(module, data, ckpt_path=path)
    return [p.tolist() for p in module.parameters()]


def _straight(rank, world_size, port, fit, rows, folder, after):
    """Weights at the end: with checkpoints inside of windows, and without."""
    saves = [SavesInside(folder, after)]
    return [fit(rank, world_size, port, rows, 0, callbacks, None) for callbacks in (saves, [])]


def _resumed(rank, world_size, port, fit, rows, folder, after):
    """Weights at the end, after each checkpoint."""
    return [fit(rank, world_size, port, rows, n, [], folder / f"{n}.ckpt") for n in after]


@pytest.mark.parametrize(
    ("fit", "rows", "after"),
    [(own_loader, 72, [1, 2, 3, 4, 6]), (shuffled_loader, 54, [1, 2, 3, 5, 8])],
)
def test_a_checkpoint_inside_a_window_resumes_on_any_number_of_ranks(fit, rows, after, tmp_path):
    draw = random.Random(2)
    rows = make_rows([draw.randint(1, 30) for _ in range(rows)])
    ((saving, whole), *_) = ranks(_straight, 2, fit, rows, tmp_path, after)
    assert saving == whole
    for number in after:
        torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
    for world_size in (1, 2, 3):
        for found in ranks(_resumed, world_size, fit, rows, tmp_path, after, timeout_s=120):
            for number, weights in zip(after, found, strict=True):
                for got, want in zip(weights, whole, strict=True):
                    assert torch.tensor(got).sub(torch.tensor(want)).abs().max() <= 1e-10, number


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
