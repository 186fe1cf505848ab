"""Fits in one process, as in a search: one that fails ends on all ranks, the next one works."""

import re
import sys

import pytest

from tests.multi_process.app.commands import succeed
from tests.support.programs import python, run_program

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

class Rate(BoringModel):
    lr = 0.1

quiet = dict(accelerator="cpu", devices=2, max_steps=2, logger=False, limit_val_batches=0)
quiet |= dict(enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
for trial in range(3):
    try:
        pl.Trainer(strategy="lean_ddp_fork", **quiet).fit(Trial())
        print("trial", trial, "trained")
    except lightning_dp.errors.RankFailedError as error:
        print("trial", trial, "rank", error.rank)

trial = 1
for alone in ({"devices": 1, "callbacks": [lightning_dp.NoiseScale()]}, {"ckpt_path": "best"}):
    at = {"ckpt_path": alone.pop("ckpt_path", None)}
    try:
        pl.Trainer(strategy="lean_ddp_fork", **{**quiet, **alone}).fit(Trial(), **at)
    except lightning_dp.errors.RankFailedError as error:
        print("before:", str(error).splitlines()[0], "| traceback", "Traceback" in str(error))
try:
    pl.tuner.Tuner(pl.Trainer(strategy="lean_ddp_fork", **quiet)).lr_find(Rate(), num_training=4)
except lightning_dp.errors.RankFailedError as error:
    print("tuner:", str(error).splitlines()[0])
"""

STOPPED = """
import multiprocessing, os, signal, time
import lightning.pytorch as pl, lightning_dp
from lightning.pytorch.demos.boring_classes import BoringModel

if multiprocessing.current_process().name == "SpawnProcess-1":  # a rank, before anything of ours runs
    time.sleep(1)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)

if __name__ == "__main__":
    for trial in range(2):
        try:
            pl.Trainer(accelerator="cpu", devices=2, strategy="lean_ddp_spawn").fit(BoringModel())
        except lightning_dp.errors.RankFailedError as error:
            print("trial", trial, "failed:", error)
"""


def test_a_request_to_stop_while_ranks_start_ends_the_search(tmp_path):
    (tmp_path / "search.py").write_text(STOPPED)
    run = run_program(python("search.py"), cwd=tmp_path)
    assert run.code == 143, run.out
    assert run.left == []
    assert "failed:" not in run.out


STOPPED_EARLY = """
import os, signal
import lightning.pytorch as pl, lightning_dp
import torch.multiprocessing as mp
from lightning.pytorch.demos.boring_classes import BoringModel

real = mp.start_processes

def start(*args, **kwargs):
    started = real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGTERM)  # ranks run, and their launcher has not been told which they are
    return started

mp.start_processes = start
pl.Trainer(accelerator="cpu", devices=2, max_epochs=-1, strategy="lean_ddp_fork", logger=False,
           enable_checkpointing=False, enable_progress_bar=False).fit(BoringModel())
print("trained")
"""


def test_a_request_to_stop_in_the_moment_of_the_start_is_not_lost(tmp_path):
    (tmp_path / "early.py").write_text(STOPPED_EARLY)
    run = run_program(python("early.py"), cwd=tmp_path, timeout_s=60)
    assert run.code == 143, run.out
    assert run.left == []
    assert "trained" not in run.out


def test_a_trial_that_fails_on_one_rank_is_followed_by_one_that_trains(tmp_path):
    (tmp_path / "search.py").write_text(SEARCH)
    output = succeed(sys.executable, "search.py", cwd=tmp_path)
    told = [line for line in output.splitlines() if line.startswith("trial ")]
    assert told == ["trial 0 trained", "trial 1 rank 1", "trial 2 trained"]
    # What fails before ranks have met, or where there is one, is told in the same words.
    alone, best = (line for line in output.splitlines() if line.startswith("before: "))
    assert re.match(r"before: \[lean_ddp\] rank 0 \(.*\) failed first in .*: ConfigError: ", alone)
    assert re.match(r"before: \[lean_ddp\] rank [01] \(.*\) failed first in .*: ValueError: ", best)
    (tuner,) = (line for line in output.splitlines() if line.startswith("tuner: "))
    assert "LaunchError: Tuner.lr_find" in tuner
    assert "LearningRateFinder()" in tuner
    assert all(line.endswith("traceback True") for line in (alone, best))
