"""What ``lean-ddp smoke`` runs on every rank: each part of training once, compared with its known result.

    python -m lightning_dp.app.smoke_run FOLDER RANKS BACKEND

Each rank writes one line for each step that it has done into FOLDER. ``LEAN_DDP_SMOKE_FAULT=RANK:STEP:HOW``
makes a rank misbehave (HOW: wrong, raise, exit, hang), so that the smoke test can be tested.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dp import LeanDDPStrategy
from lightning_dp.launch.exit_code import PREEMPTED

FAULT_VARIABLE = "LEAN_DDP_SMOKE_FAULT"
WINDOW = 2
STOP_AT = 3
LAST_STEP = 6
LR = 0.1


class SmokeError(AssertionError):
    """A result is not what it must be."""


class Samples(Dataset[Tensor]):
    """Sample ``i`` is ``[i + 1]``: 2 samples for each rank, micro-batch and step."""

    def __init__(self, world_size: int) -> None:
        self.size = world_size * WINDOW * LAST_STEP

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 1.0])


class Line(L.LightningModule):
    """One weight and one loss whose gradient is the mean of the samples."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told = told
        self.weight = nn.Parameter(torch.zeros(1))
        self.stops = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        told, step = self.told, self.trainer.global_step
        if step == 0 and batch_idx == 0 and not told.has("all-reduce"):
            self._reduce()
        if step == 1 and not told.has("accumulation"):
            self._compare_with_closed_form(batch)
        if (
            self.stops
            and step == STOP_AT
            and self.trainer.global_rank == self.trainer.world_size - 1
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        return (self.weight * batch).mean()

    def _reduce(self) -> None:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        own = torch.tensor(float(rank + 1), device=self.device)
        total = float(self.trainer.strategy.reduce(own, reduce_op="sum"))
        expected = world_size * (world_size + 1) / 2
        self.told.done("all-reduce", total, expected)

    def _compare_with_closed_form(self, batch: Tensor) -> None:
        """After one step the weight is minus the rate times the mean of the first window's samples."""
        count = self.trainer.world_size * WINDOW
        expected = -LR * (count + 1) / 2
        self.told.done("accumulation", float(self.weight), expected)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the weight tells what the gradient was."""
        return torch.optim.SGD(self.parameters(), lr=LR)


class Told:
    """One rank's lines, and the misbehaviour that was asked for."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = folder / f"rank{rank}.jsonl"
        self.rank = rank
        self._begin = time.monotonic()
        who, step, how = (os.environ.get(FAULT_VARIABLE) or "-1::").split(":")
        self._fault = (step, how) if int(who) == rank else ("", "")
        self._done: set[str] = set()

    def has(self, step: str) -> bool:
        """Whether ``step`` was told."""
        return step in self._done

    def done(self, step: str, value: float, expected: float) -> None:
        """Tell that ``step`` gave ``value``.

        Raises:
            SmokeError: It is not ``expected``.
        """
        if self._fault[0] == step:
            value = self._misbehave(value)
        seconds = time.monotonic() - self._begin
        self._done.add(step)
        with self.file.open("a") as file:
            file.write(json.dumps([step, value, expected, round(seconds, 2)]) + "\n")
        if abs(value - expected) > 1e-5 * max(1.0, abs(expected)):
            raise SmokeError(f"{step}: rank {self.rank} got {value}, and {expected} is right")

    def _misbehave(self, value: float) -> float:
        how = self._fault[1]
        if how == "raise":
            raise RuntimeError("asked to misbehave")
        if how == "exit":
            os._exit(9)
        if how == "hang":
            time.sleep(3600)
        return value + 1


def trainer(folder: Path, ranks: int, backend: str) -> L.Trainer:
    """A quiet Trainer of ``ranks`` ranks that accumulates and keeps its last checkpoint."""
    return L.Trainer(
        accelerator="cpu" if backend == "gloo" else "gpu",
        devices=ranks,
        strategy=LeanDDPStrategy(process_group_backend=backend, rendezvous_timeout_s=60.0),
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
    first = trainer(folder, ranks, backend)
    told = Told(folder, int(os.environ.get("RANK", 0)))
    model = Line(told)
    model.stops = True
    data = DataLoader(Samples(ranks), batch_size=1)
    model.on_train_start = lambda: told.done(  # type: ignore[method-assign]
        "start", float(first.world_size), float(ranks)
    )
    code = 0
    try:
        first.fit(model, data)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else -1
    told.done("preemption", code, PREEMPTED)
    again = Line(told)
    second = trainer(folder, ranks, backend)
    began: list[int] = []
    again.on_train_start = lambda: began.append(second.global_step)  # type: ignore[method-assign]
    second.fit(again, DataLoader(Samples(ranks), batch_size=1), ckpt_path="last")
    count = ranks * WINDOW * LAST_STEP
    resumed_late = began[0] <= STOP_AT - 1 or second.global_step != LAST_STEP
    everything = -LR * sum(range(1, count + 1)) / (ranks * WINDOW)
    told.done("resume", float("inf") if resumed_late else float(again.weight), everything)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
