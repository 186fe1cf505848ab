"""The training program of the kill test: notes every sample, and one rank of it fails where it is told to.

    python -m benchmarks.kill_training SPEC.json

runs it as a user would, with the ranks started by ``lean_ddp``; the kill test also forks it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dp import LeanDDPStrategy

MOMENTS = ("start", "forward", "backward", "collective", "save", "write", "validation")
WAYS = ("SIGKILL", "SIGTERM", "exception", "exit")
SAMPLES, EPOCHS, BATCH = 60, 2, 2
SAVE_EVERY = 2


@dataclass(frozen=True)
class Spec:
    """One attempt.

    Attributes:
        root: Where checkpoints and reports go.
        world_size: Ranks.
        attempt: 0 fails, 1 resumes.
        victim: The rank that fails; -1 for none.
        moment: Where.
        way: How.
        step: At the first such moment from this optimizer step on.
        seed: Of the order of samples.
        workers: Data-loader processes of each rank.
        every: Local steps between two meetings; 0 reduces gradients in each step.
        wire: What gradients travel as; all but ``"auto"`` over the process group.
    """

    root: str
    world_size: int
    attempt: int
    victim: int
    moment: str
    way: str
    step: int
    seed: int
    workers: int = 0
    every: int = 0
    wire: str = "auto"

    @property
    def folder(self) -> Path:
        return Path(self.root)

    @property
    def options(self) -> dict[str, Any]:
        """Of the strategy."""
        if self.every:
            return {"outer": {"every": self.every}}
        if self.wire == "auto":
            return {}
        return {"wire": {"dtype": self.wire, "min_bytes": 0}, "shared_memory": False}


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Fault:
    """Fails once, on the victim, and notes when."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.armed = False

    def reach(self, moment: str, step: int) -> None:
        spec = self.spec
        if not self.armed or moment != spec.moment or step < spec.step:
            return
        self.armed = False
        (spec.folder / "fault").write_text(str(time.time()))
        if spec.way == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.way == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if spec.way == "exit":
            os._exit(7)
        if spec.way == "exception":
            raise ValueError("the kill test's own error")


class Model(pl.LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def setup(self, stage: str) -> None:
        self.fault.armed = self.trainer.global_rank == self.fault.spec.victim
        self.fault.reach("start", self.fault.spec.step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        time.sleep(0.01)
        self.fault.reach("forward", step)
        loss = self.net(batch / SAMPLES).square().mean()
        loss.register_hook(lambda grad: self.fault.reach("backward", step))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fault.reach("validation", self.trainer.global_step)
        self.log("val", batch.mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fault.reach("save", self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        workers = self.fault.spec.workers
        return DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Samples(), batch_size=BATCH)


class Notes(Callback):
    """Writes which samples this rank has trained on, and by which step."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def on_train_batch_end(
        self, trainer: Any, module: Any, out: Any, batch: Tensor, i: int
    ) -> None:
        name = f"samples.{self.spec.attempt}.{trainer.global_rank}"
        line = [trainer.current_epoch, trainer.global_step, batch.flatten().int().tolist()]
        with (self.spec.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(spec: Spec, strategy: Any = None) -> None:
    """Run one attempt on this rank; the error that ends it is noted and raised."""
    pl.seed_everything(spec.seed, verbose=False)
    fault = Fault(spec)
    model = Model(fault)
    made = strategy if strategy is not None else LeanDDPStrategy(**spec.options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=spec.world_size,
        strategy=made,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[
            Notes(spec),
            ModelCheckpoint(spec.root, save_last=True, every_n_train_steps=SAVE_EVERY),
        ],
        default_root_dir=spec.root,
    )
    _watch_collectives(made, fault, trainer)
    _watch_writes(fault, trainer)
    try:
        trainer.fit(model, ckpt_path="last" if spec.attempt else None)
    except BaseException as error:
        rank = os.environ.get("RANK", "0")
        told = {"type": type(error).__name__, "rank": getattr(error, "rank", None)}
        (spec.folder / f"error.{spec.attempt}.{rank}").write_text(json.dumps(told))
        raise
    (spec.folder / f"step.{trainer.global_rank}").write_text(str(trainer.global_step))


def _watch_collectives(strategy: Any, fault: Fault, trainer: pl.Trainer) -> None:
    """Fail when the first bucket of a step is on its way."""
    attach = strategy._engine.attach

    def attached(*args: Any) -> None:
        attach(*args)
        wire = strategy._engine.reducer.wire
        launch: Callable[..., Any] = wire.launch

        def launched(bucket: Any) -> Any:
            work = launch(bucket)
            fault.reach("collective", trainer.global_step)
            return work

        wire.launch = launched

    strategy._engine.attach = attached


def _watch_writes(fault: Fault, trainer: pl.Trainer) -> None:
    """Fail when a checkpoint is written and not yet in its place (rank 0 writes)."""
    replace = os.replace

    def replaced(source: Any, target: Any) -> None:
        if str(target).endswith(".ckpt"):
            fault.reach("write", trainer.global_step)
        replace(source, target)

    os.replace = replaced


def to_json(spec: Spec) -> str:
    return json.dumps(asdict(spec))


if __name__ == "__main__":
    train(Spec(**json.loads(Path(sys.argv[1]).read_text())))
