"""Lightning's callbacks give what they give under `ddp`: weights, buffers, checkpoints, learning rates."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.engine.wires.wire import Done
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import RankError
from tests.support.trainers import Rows, ddp, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class Net(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.double()
        self.lr = lr

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def train(rank, world_size, port, kind, make, epochs, options, after=None):
    """Fit with validation; return what is to be compared."""
    with tempfile.TemporaryDirectory() as root:
        module = Net()
        strategy = lean(check_replicas_every_n_steps=1) if kind == "lean" else ddp()
        callbacks = make(Path(root))
        runner = trainer(
            world_size, port, strategy, root, callbacks=callbacks, max_epochs=epochs,
            num_sanity_val_steps=0, **options,
        )  # fmt: skip
        # `ddp` shuffles the training loader even where the user did not ask for it
        train_loader = DataLoader(Rows(48), batch_size=6, shuffle=True)
        runner.fit(module, train_loader, DataLoader(Rows(24), batch_size=6))
        if kind == "lean":
            assert_equal_on_all_ranks(module.state_dict())
        found = {name: value.clone() for name, value in module.state_dict().items()}
        for name, value in runner.callback_metrics.items():
            found[f"metric {name}"] = value
        if after is not None:
            found.update(after(module, runner, callbacks))
        runner.strategy.barrier()
        return found


def same_as_ddp(make, epochs=3, after=None, **options):
    """Train under both strategies on two ranks: the same numbers, and the same names of them."""
    ours = ranks(train, 2, "lean", make, epochs, options, after)
    theirs = ranks(train, 2, "ddp", make, epochs, options, after)
    assert ours[0].keys() == theirs[0].keys()
    for name, value in theirs[0].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                ours[0][name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert ours[0][name] == value, name
    return ours


def test_exponential_moving_average():
    def after(module, runner, callbacks):
        average = callbacks[0]._average_model.module
        assert_equal_on_all_ranks(dict(average.named_parameters()))
        assert not any(p._post_accumulate_grad_hooks for p in average.parameters())
        return {f"average {k}": v for k, v in average.state_dict().items()}

    same_as_ddp(lambda root: [cb.EMAWeightAveraging(decay=0.8)], after=after)


def test_weight_averaging():
    same_as_ddp(lambda root: [cb.WeightAveraging()], accumulate_grad_batches=2)


def test_stochastic_weight_averaging():
    same_as_ddp(
        lambda root: [
            cb.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2)
        ],
        epochs=4,
    )


def _checkpoints(module, runner, callbacks):
    found = {}
    kept = callbacks[0]
    paths = runner.strategy.broadcast([*sorted(kept.best_k_models), kept.last_model_path])
    for path in paths:
        saved = torch.load(path, weights_only=True)
        for name, value in saved["state_dict"].items():
            found[f"{Path(path).name} {name}"] = value
        momenta = saved["optimizer_states"][0]["state"]
        for number, state in momenta.items():
            found[f"{Path(path).name} momentum {number}"] = state["momentum_buffer"]
    found["best"] = Path(kept.best_model_path).name
    return found


def test_model_checkpoint():
    same_as_ddp(
        lambda root: [cb.ModelCheckpoint(root, monitor="val", save_top_k=2, save_last=True)],
        after=_checkpoints,
        enable_checkpointing=True,
    )


def test_ema_in_checkpoints():
    same_as_ddp(
        lambda root: [
            cb.ModelCheckpoint(root, monitor="val", save_top_k=2, save_last=True),
            cb.EMAWeightAveraging(decay=0.8),
        ],
        after=_checkpoints,
        enable_checkpointing=True,
    )


def test_learning_rate_finder():
    def after(module, runner, callbacks):
        return {"lr": module.lr, "suggestion": callbacks[0].optimal_lr.suggestion()}

    found = same_as_ddp(
        lambda root: [cb.LearningRateFinder(num_training_steps=12, min_lr=1e-4, max_lr=1.0)],
        after=after,
        enable_checkpointing=True,
    )
    assert found[0]["lr"] == found[1]["lr"]


def test_gradient_accumulation_scheduler():
    def after(module, runner, callbacks):
        return {"steps": runner.global_step}

    found = same_as_ddp(
        lambda root: [cb.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], after=after
    )
    assert found[0]["steps"] == 4 + 2 + 1


def test_model_pruning():
    def after(module, runner, callbacks):
        zeros = sum(
            int((m.weight == 0).sum()) for m in module.modules() if isinstance(m, nn.Linear)
        )
        assert zeros > 20
        return {"zeros": zeros}

    same_as_ddp(
        lambda root: [
            cb.ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.4, verbose=0)
        ],
        after=after,
    )


def test_early_stopping():
    def after(module, runner, callbacks):
        return {"epoch": runner.current_epoch}

    found = same_as_ddp(
        lambda root: [cb.EarlyStopping("val", min_delta=1.0, patience=2)], epochs=8, after=after
    )
    assert found[0]["epoch"] < 8


class FakePsutil:
    """DeviceStatsMonitor wants psutil for a CPU; what it reads does not matter here."""

    __spec__ = None

    @staticmethod
    def virtual_memory():
        return type("Memory", (), {"percent": 1.0})()

    swap_memory = virtual_memory

    @staticmethod
    def cpu_percent():
        return 2.0


def _monitored(rank, world_size, port):
    sys.modules.setdefault("psutil", FakePsutil())
    cb.device_stats_monitor._PSUTIL_AVAILABLE = True
    pl.accelerators.cpu._PSUTIL_AVAILABLE = True
    with tempfile.TemporaryDirectory() as root:
        runner = trainer(
            world_size, port, lean(), root, logger=CSVLogger(root),
            callbacks=[cb.DeviceStatsMonitor(cpu_stats=True), cb.ModelSummary(max_depth=2)],
            log_every_n_steps=1, enable_model_summary=rank == 0,
        )  # fmt: skip
        runner.fit(Net(), DataLoader(Rows(48), batch_size=6))
        if rank:
            return ""
        runner.logger.save()
        return (Path(runner.logger.log_dir) / "metrics.csv").read_text()


def test_device_stats_and_model_summary():
    text = ranks(_monitored, 2)[0]
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_percent" in text
    assert "loss" in text


def _local(rank, world_size, port):
    def nothing(self, bucket):
        bucket.allocate()
        return Done()

    AllReduceWire.launch = SharedMemoryWire.launch = nothing
    train(rank, world_size, port, "lean", lambda root: [], 1, {})


def test_control_a_missing_average_is_seen():
    with pytest.raises(RankError, match="differ"):
        ranks(_local, 2)
