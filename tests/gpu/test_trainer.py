"""A Trainer on GPUs: ranks that share one, and one a rank."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.models import job
from tests.multi_process.step.test_demos import DEMOS
from tests.support import grounds
from tests.support.modules import Base
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import RankError
from tests.support.trainers import fit, lean, ranks, trainer

pytestmark = pytest.mark.usefixtures("gpu_ground")


class Strict(pl.Callback):
    """From step 6 to step 25 the host must not wait for the device."""

    def __init__(self, reads):
        self.reads = reads

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.reads and batch_idx == 8:
            outputs["loss"].item()
        if batch_idx == 25:
            torch.cuda.set_sync_debug_mode("default")


def _job():
    module = job("transformer")
    return module, module.loader(30)


MODELS = {**DEMOS, "transformer": _job}


def _twenty_steps(rank, world_size, port, name, reads):
    torch.manual_seed(1)
    module, loader = MODELS[name]()
    rows = DataLoader(loader.dataset, batch_size=loader.batch_size, pin_memory=True)
    strategy = lean(check_replicas_every_n_steps=0)
    strategy._engine.reduces_alone = True
    options = {"max_epochs": -1, "max_steps": 28, "use_distributed_sampler": False}
    t = trainer(world_size, port, strategy, callbacks=[Strict(reads)], **options)
    try:
        t.fit(module, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert t.global_step == 28


@pytest.fixture
def nccl(gpu_ground, monkeypatch):
    """gloo copies through the host, which waits: of the ranks that share a GPU there is one, with NCCL."""
    if grounds.CURRENT.gpus < 1:
        monkeypatch.setattr(grounds, "CURRENT", grounds.ALONE)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("name", MODELS)
def test_the_host_waits_for_the_device_in_none_of_20_steps(name):
    ranks(_twenty_steps, 1, name, False, timeout_s=120)


@pytest.mark.usefixtures("nccl")
def test_control_a_read_of_the_loss_is_seen():
    with pytest.raises(RankError, match="synchronizing CUDA operation"):
        ranks(_twenty_steps, 1, "transformer", True, timeout_s=120)


class Overflows(Base):
    """fp16; the loss of rank 1 overflows in its second step."""

    def __init__(self):
        super().__init__()
        self.float()
        self.scales = []

    def training_step(self, batch, batch_idx):
        bad = batch_idx == 1 and self.trainer.global_rank == 1
        return self.loss(batch.float()) * (float("inf") if bad else 1.0)

    def on_train_batch_end(self, *_):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _overflow(rank, world_size, port):
    module = Overflows()
    fit(module, rank, world_size, port, lean(), precision="16-mixed")
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    assert all(torch.isfinite(p).all() for p in module.parameters())
    return module.scales


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    first, second = ranks(_overflow, 2)
    assert first == second
    assert first[1] == first[0] / 2, "control: there was an overflow"
    assert first[2] == first[1]
