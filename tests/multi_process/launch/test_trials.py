"""Fits in one process, as in a search: one that fails ends on all ranks, the next one works."""

import sys

import pytest

from tests.multi_process.app.commands import succeed

pytestmark = pytest.mark.multi_process

SEARCH = """
import gc, lightning.pytorch as pl, lightning_dp
from lightning.pytorch.demos.boring_classes import BoringModel

class Trial(BoringModel):
    def training_step(self, batch, batch_idx):
        gc.collect()  # of what the process had when it was forked, too
        if trial == 1 and self.trainer.global_rank == 1:
            raise ValueError("diverged")
        return super().training_step(batch, batch_idx)

quiet = dict(accelerator="cpu", devices=2, max_steps=2, logger=False, limit_val_batches=0)
quiet |= dict(enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
for trial in range(3):
    try:
        pl.Trainer(strategy="lean_ddp_fork", **quiet).fit(Trial())
        print("trial", trial, "trained")
    except lightning_dp.errors.RankFailedError as error:
        print("trial", trial, "rank", error.rank)
"""


def test_a_trial_that_fails_on_one_rank_is_followed_by_one_that_trains(tmp_path):
    (tmp_path / "search.py").write_text(SEARCH)
    output = succeed(sys.executable, "search.py", cwd=tmp_path)
    told = [line for line in output.splitlines() if line.startswith("trial ")]
    assert told == ["trial 0 trained", "trial 1 rank 1", "trial 2 trained"]
