"""Z15: a schedule-free optimizer, whose ``train`` and ``eval`` move parameters, with validation."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.multi_process.optim.test_step_bits import assert_same_bytes
from tests.multi_process.optim.test_zero_trainer import Net
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import both_worlds
from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]


class AdamWScheduleFree(torch.optim.Optimizer):
    """As the one of the package schedulefree: steps at ``y``, evaluates at ``x``, keeps ``z``."""

    def __init__(self, params: Any, lr: float = 0.02, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                weight = 1 - group["beta"] if train_mode else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = train_mode

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"], state["square"] = p.clone(), torch.zeros_like(p)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                step = p.grad / (state["square"].sqrt() + 1e-8)
                p.lerp_(end=state["z"], weight=1 / (group["k"] + 1))
                p.add_(step, alpha=-group["lr"] * (1 - group["beta"]))
                state["z"].sub_(step, alpha=group["lr"])
            group["k"] += 1
        return loss


class Free(Net):
    """Switches through the Trainer's wrapper, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return AdamWScheduleFree(self.parameters())

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_validation_epoch_end(self) -> None:
        assert_equal_on_all_ranks(dict(self.named_parameters()))
        self.optimizers().train()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(self.loss(batch)))


class Keeps(Callback):
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self.state = copy.deepcopy(trainer.strategy.optimizer_state(optimizer))


def _free(rank: int, world: int, port: int) -> None:
    found = {}
    for zero in (0, 1):
        module, keeps = Free(), Keeps()
        strategy = lean(zero=zero, check_replicas_every_n_steps=1)
        runner = trainer(
            world, port, strategy, callbacks=[keeps], max_epochs=3, num_sanity_val_steps=0
        )
        loader = DataLoader(Rows(), batch_size=12 // world, shuffle=False)
        runner.fit(module, loader, loader)
        assert strategy._engine.zero._sharded.keys() == ({0} if zero else set())
        found[zero] = module.state_dict(), module.losses, keeps.state
    assert_same_bytes(found[1][:2], found[0][:2], "schedule-free")
    if rank == 0:
        assert_same_bytes(found[1][2]["param_groups"], found[0][2]["param_groups"], "groups")


@both_worlds
def test_z15_a_schedule_free_optimizer_with_validation(world_size):
    ranks(_free, world_size)
