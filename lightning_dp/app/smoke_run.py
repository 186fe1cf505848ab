"""What ``lean-ddp smoke`` runs on every rank: each part of training once, compared with its known result.

    python -m lightning_dp.app.smoke_run FOLDER RANKS BACKEND

Each rank writes one file for each step that it has done into FOLDER. ``LEAN_DDP_SMOKE_FAULT=RANK:STEP:HOW``
makes a rank misbehave (HOW: wrong, exit, hang), so that the smoke test can be tested.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import LeanDDPStrategy
from lightning_dp.internals.lightning import ModelCheckpoint, pl
from lightning_dp.launch.exit_code import PREEMPTED

FAULT_VARIABLE = "LEAN_DDP_SMOKE_FAULT"
WINDOW = 2
STOP_AT = 3
LAST_STEP = 6
LR = 0.1


def loader(ranks: int) -> DataLoader[Tensor]:
    """Sample ``i`` is ``[i + 1]``, in order: as many as the steps need."""
    count = ranks * WINDOW * LAST_STEP
    return DataLoader(list(torch.arange(1.0, count + 1).unsqueeze(1)), batch_size=1)  # type: ignore[arg-type]


class Line(pl.LightningModule):
    """One weight and one loss whose gradient is the mean of the samples.

    Args:
        results: Where they go.
        stops: Whether the last rank is asked to stop before the run is over.
    """

    def __init__(self, results: Results, *, stops: bool) -> None:
        super().__init__()
        self.results = results
        self.stops = stops
        self.weight = nn.Parameter(torch.zeros(1))
        self.began = 0

    def on_train_start(self) -> None:
        """Count the ranks; remember where a resumed run begins."""
        self.began = self.trainer.global_step
        if self.began == 0:
            self.results.done("start", self.trainer.world_size, self.results.ranks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        rank, ranks, step = self.trainer.global_rank, self.results.ranks, self.trainer.global_step
        if batch_idx == 0:
            own = torch.tensor(rank + 1.0, device=self.device)
            total = float(self.trainer.strategy.reduce(own, reduce_op="sum"))
            self.results.done("all-reduce", total, ranks * (ranks + 1) / 2)
        if batch_idx == WINDOW:  # minus the rate times the mean of the first window's samples
            self.results.done("accumulation", float(self.weight), -LR * (ranks * WINDOW + 1) / 2)
        if self.stops and step == STOP_AT and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the weight tells what the gradient was."""
        return torch.optim.SGD(self.parameters(), lr=LR)


class Sums(Line):
    """As ``Line``, with momentum 1: the sum of all gradients so far is a state that can be shared."""

    def __init__(self, results: Results) -> None:
        super().__init__(results, stops=False)

    def on_train_start(self) -> None:
        """Nothing is counted."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The weight tells which gradients were kept."""
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=1.0)


class Results:
    """One rank's results, and the misbehaviour that was asked for."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.file = f"{folder}/rank{rank}"
        self.ranks = ranks
        self._begin = time.monotonic()
        who, step, how = (os.environ.get(FAULT_VARIABLE) or "-1::").split(":")
        self._fault = (step, how) if int(who) == rank else ("", "")

    def done(self, step: str, value: float, expected: float) -> None:
        """Tell that ``step`` gave ``value``.

        Raises:
            AssertionError: It is not ``expected``.
        """
        how = self._fault[1] if self._fault[0] == step else ""
        if how == "exit":
            os._exit(9)
        if how == "hang":
            time.sleep(3600)
        value += how == "wrong"
        right = abs(value - expected) <= 1e-5 * max(1.0, abs(expected))
        wrong = "" if right else f"got {value:g}, and {expected:g} is right"
        seconds = time.monotonic() - self._begin
        Path(f"{self.file}.{step}.json").write_text(json.dumps([wrong, seconds]))
        assert right, f"{step}: {wrong}"


def trainer(folder: Path, ranks: int, backend: str, zero: Literal[0, 1] = 0) -> pl.Trainer:
    """A quiet Trainer of ``ranks`` ranks that accumulates and keeps its last checkpoint."""
    return pl.Trainer(
        accelerator="cpu" if backend == "gloo" else "gpu",
        devices=ranks,
        strategy=LeanDDPStrategy(
            process_group_backend=backend, rendezvous_timeout_s=60.0, zero=zero
        ),
        max_steps=LAST_STEP,
        max_epochs=-1,
        accumulate_grad_batches=WINDOW,
        limit_val_batches=0,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )


def run(folder: Path, ranks: int, backend: str) -> None:
    """Train, be asked to stop, resume, compare."""
    results = Results(folder, int(os.environ.get("RANK", 0)), ranks)
    code: object = 0
    try:
        trainer(folder, ranks, backend).fit(Line(results, stops=True), loader(ranks))
    except SystemExit as stop:
        code = stop.code
    results.done("preemption", code if isinstance(code, int) else -1, PREEMPTED)
    model, again = Line(results, stops=False), trainer(folder, ranks, backend)
    again.fit(model, loader(ranks), ckpt_path="last")
    goes_on = model.began >= STOP_AT and again.global_step == LAST_STEP
    count = ranks * WINDOW * LAST_STEP
    everything = -LR * sum(range(1, count + 1)) / (ranks * WINDOW)
    results.done("resume", float(model.weight) if goes_on else float("inf"), everything)
    shared = Sums(results)
    trainer(folder, ranks, backend, zero=1).fit(shared, loader(ranks))
    # Each step moves by the sum of the means so far.
    size = ranks * WINDOW
    means = [step * size + (size + 1) / 2 for step in range(LAST_STEP)]
    expected = -LR * sum(mean * (LAST_STEP - step) for step, mean in enumerate(means))
    results.done("zero", float(shared.weight), expected)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
