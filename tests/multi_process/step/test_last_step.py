"""What an accelerator's host reads one step late is also read of the step that no other follows."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_dp.errors import ConfigError, NonFiniteGradientError
from tests.support.trainers import fit, lean, ranks

pytestmark = pytest.mark.multi_process
LAST = 3  # the batch of a four-step epoch


class Bad(pl.LightningModule):
    def __init__(self, what, rank):
        super().__init__()
        self.layer = nn.Linear(6, 1).double()
        self.what, self.bad = what, rank == 1

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        weight = torch.tensor(2.0)
        if self.bad and batch_idx == LAST:
            loss = loss * float("nan") if self.what == "gradient" else loss
            weight = -weight if self.what == "weight" else weight
        return {"loss": loss, "loss_weight": weight}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def _fit(rank, world_size, port, what, deferred):
    strategy = lean(check_gradients="raise")
    strategy._engine.host_reads_are_free = not deferred
    error = {"gradient": NonFiniteGradientError, "weight": ConfigError, "nothing": ()}[what]
    try:
        fit(Bad(what, rank), rank, world_size, port, strategy)
    except error:
        return True
    return False


@pytest.mark.parametrize("what", ["gradient", "weight", "nothing"])
def test_a_bad_last_step_is_told_on_all_ranks(what):
    assert ranks(_fit, 2, what, True) == [what != "nothing"] * 2
