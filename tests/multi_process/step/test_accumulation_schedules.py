"""Windows, optimizer steps and schedules: they are counted alike."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_dp.errors import ConfigError
from tests.support import grounds
from tests.support.logs import log_lines
from tests.support.trainers import lean, ranks, trainer
from tests.support.windows import InOrder, Tokens, Unit, make_rows

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]
LIGHTNINGS = pl.Trainer.estimated_stepping_batches


def _frequency(rank, world_size, port, frequency):
    class Scheduled(Unit):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
            return [optimizer], [
                {"scheduler": self.scheduler, "interval": "step", "frequency": frequency}
            ]

    module = Scheduled()
    t = trainer(world_size, port, lean(), accumulate_grad_batches=4)
    t.fit(module, DataLoader(torch.zeros(24 * world_size, 1), batch_size=1))
    return module.scheduler.last_epoch


@pytest.mark.parametrize(("frequency", "want"), [(1, 6), (2, 3), (4, 1), (8, 0)])
def test_scheduler_frequency_counts_optimizer_steps(frequency, want):
    """6 optimizer steps; ddp gives 6, 6, 6 and 3."""
    assert ranks(_frequency, 1, frequency) == [want]


def _estimate(rank, world_size, port, schedule, tail):
    class Asks(Unit):
        def configure_optimizers(self):
            self.estimated = int(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    module = Asks()
    callbacks = [GradientAccumulationScheduler(schedule)] if schedule else []
    t = trainer(
        world_size,
        port,
        lean(incomplete_window=tail),
        callbacks=callbacks,
        max_epochs=4,
        accumulate_grad_batches=1 if schedule else 3,
    )
    t.fit(module, DataLoader(torch.zeros(8 * world_size, 1), batch_size=1))
    assert pl.Trainer.estimated_stepping_batches is LIGHTNINGS, "other trainers keep theirs"
    return module.estimated, t.global_step


@pytest.mark.parametrize("tail", ["step", "carry", "drop"])
@pytest.mark.parametrize("schedule", [None, {0: 4, 2: 2}, {0: 3, 1: 5}])
def test_estimated_steps_are_the_steps_made(schedule, tail):
    for estimated, made in ranks(_estimate, 2, schedule, tail):
        assert estimated == made


def _global_batch(rank, world_size, port, batch, loader_batch):
    module = Unit()
    t = trainer(world_size, port, lean(batch=batch))
    t.fit(module, DataLoader(torch.zeros(48, 1), batch_size=loader_batch))
    return t.accumulate_grad_batches, t.global_step, module.seen


def test_a_global_batch_sets_the_accumulation_before_optimizers_are_configured():
    batch = {"global": 24, "micro": 3, "accumulate": "auto"}
    for steps, made, seen in ranks(_global_batch, 2, batch, 3):
        assert (steps, made) == (4, 2)
        assert seen == [1.0, 1.0]


def _refused(rank, world_size, port, batch):
    with pytest.raises(ConfigError) as caught:
        _global_batch(rank, world_size, port, batch, 4)
    return str(caught.value)


def test_a_loader_with_another_batch_size_is_a_clear_error():
    batch = {"global": 24, "micro": 3}
    for traceback in ranks(_refused, 2, batch):
        assert "batch_size is 4" in traceback
        assert "batch.micro=3" in traceback


def _skipped(rank, world_size, port):
    from lightning.pytorch.plugins import MixedPrecision

    class Overflows(Unit):
        def training_step(self, batch, batch_idx):
            return self.w * (float("inf") if batch_idx == 1 else 1.0)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    module = Overflows()
    device = grounds.CURRENT.device_type
    plugin = MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device, init_scale=4.0))
    t = trainer(world_size, port, lean(), plugins=[plugin])
    t.fit(module, DataLoader(torch.zeros(4 * world_size, 1), batch_size=1))
    return module.scheduler.last_epoch


def test_a_step_skipped_by_the_gradient_scaler_does_not_advance_the_scheduler():
    assert ranks(_skipped, 2) == [3, 3]


def _misfits(rank, world_size, port):
    class Validates(Tokens):
        def validation_step(self, batch, batch_idx):
            pass

    rows = make_rows([3] * 12)
    module = Validates(rows)
    order = InOrder(range(rank, 12, world_size))
    said = log_lines()
    t = trainer(
        world_size,
        port,
        lean(),
        accumulate_grad_batches=4,
        val_check_interval=3,
        use_distributed_sampler=False,
    )
    t.fit(module, DataLoader(range(12), batch_size=1, sampler=order), DataLoader(range(2)))
    t = trainer(world_size, port, lean(), accumulate_grad_batches=8, use_distributed_sampler=False)
    t.fit(Tokens(rows), DataLoader(range(12), batch_size=1, sampler=order))
    return said


def test_settings_that_cut_windows_are_said_at_the_start():
    said = ranks(_misfits, 2)[0]
    assert any("val_check_interval=3" in line for line in said)
    assert any("fewer than accumulate_grad_batches=8" in line for line in said)
