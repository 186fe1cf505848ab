"""The learning rate at every update, for schedulers of every kind, also resumed on other ranks."""

from __future__ import annotations

import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_dp import LRScaling
from lightning_dp.errors import ConfigError
from tests.support.logs import log_lines
from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = pytest.mark.multi_process

BASE = (0.5, 0.03)  # of two groups


class Recording(torch.optim.SGD):
    """Remembers the rates with which it really computed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.used = []

    def step(self, closure=None):
        torch.optim.SGD(
            self.param_groups[0]["params"]
        )  # from here on torch's hooks stand on its step too
        output = super().step(closure)
        self.used.append([float(group["lr"]) for group in self.param_groups])
        return output


# Each builds a scheduler; the last two read group["lr"] to write the next one.
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, list(BASE), total_steps=40),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30, eta_min=0.001),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.7, patience=0),
}


class Module(pl.LightningModule):
    def __init__(self, kind, tensor_lr=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1)).double()
        self.kind = kind
        self.tensor_lr = tensor_lr
        self.seen = []  # by the closure

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if batch_idx % 2:  # the window's last micro-batch
            self.seen.append([float(group["lr"]) for group in self.optimizer.param_groups])
        self.log("bad", 1.0)  # never improves: the plateau scheduler reduces after each epoch
        return loss

    def configure_optimizers(self):
        self.optimizer = groups(self.net, self.tensor_lr)
        scheduler = SCHEDULERS[self.kind](self.optimizer)
        interval = "epoch" if self.kind == "plateau" else "step"
        entry = {"scheduler": scheduler, "interval": interval, "monitor": "bad"}
        return {"optimizer": self.optimizer, "lr_scheduler": entry}


def groups(net, tensor_lr=False):
    first, last = net
    lr = [torch.tensor(rate) if tensor_lr else rate for rate in BASE]
    return Recording(
        [
            {"params": first.parameters(), "lr": lr[0]},
            {"params": last.parameters(), "lr": lr[1]},
        ]
    )


def plain_rates(kind, updates):
    """What the scheduler alone gives at each update, in plain torch."""
    optimizer = groups(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    scheduler = SCHEDULERS[kind](optimizer)
    rates = []
    for _ in range(updates):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def _fit(rank, world_size, port, folder, resume, updates):
    """Train under each scheduler; return the rates used and seen, and what was said."""
    found = {}
    for kind, tensor_lr in KINDS:
        said = log_lines()
        module = Module(kind, tensor_lr)
        runner = trainer(
            world_size,
            port,
            lean(check_replicas_every_n_steps=1),
            callbacks=[LRScaling(rule="linear", base_batch=4, warmup_epochs=2)],
            accumulate_grad_batches=2,
            max_epochs=-1,
            max_steps=updates,
        )
        path = f"{folder}/{kind}{tensor_lr}.ckpt"
        runner.fit(module, DataLoader(Rows(), batch_size=2), ckpt_path=path if resume else None)
        if not resume:
            runner.save_checkpoint(path)
        assert isinstance(module.optimizer.param_groups[0]["lr"], torch.Tensor) == tensor_lr
        found[kind, tensor_lr] = module.optimizer.used, module.seen, said
    return found


# 48 rows, 2 a micro-batch, 2 micro-batches: 6 updates an epoch of 8 samples on two ranks, 4 of 12 on three.
FIRST, LAST = 9, 18
KINDS = [*((kind, False) for kind in SCHEDULERS), ("cosine", True)]


def test_every_update_uses_the_formula_also_resumed_in_mid_warm_up_on_other_ranks(tmp_path):
    before = ranks(_fit, 2, str(tmp_path), False, FIRST)[0]
    after = ranks(_fit, 3, str(tmp_path), True, LAST)[0]
    done = [t / 12 for t in range(FIRST)] + [FIRST / 12 + t / 8 for t in range(LAST - FIRST)]
    full = [2.0] * FIRST + [3.0] * (LAST - FIRST)
    factors = [1 + (k - 1) * min(1.0, t) for k, t in zip(full, done, strict=True)]
    assert (factors[0], factors[-1]) == (1, 3)
    for kind, tensor_lr in KINDS:
        used, seen = (before[kind, tensor_lr][i] + after[kind, tensor_lr][i] for i in range(2))
        assert len(used) == LAST
        close = 1e-6 if tensor_lr else 1e-12
        for rates, plain, factor in zip(used, seen, factors, strict=True):
            assert rates == pytest.approx([rate * factor for rate in plain], rel=close), kind
        # The closure, and so what is logged and saved from it, sees what the scheduler alone gives.
        if kind == "plateau":  # whether an epoch that was resumed half done counts is Lightning's
            assert {rates[0] for rates in seen} <= {BASE[0] * 0.7**n for n in range(5)}
            assert seen[-1][0] < seen[0][0]
        else:
            for rates, plain in zip(seen, plain_rates(kind, LAST), strict=True):
                assert rates == pytest.approx(plain, rel=close)
        said = after[kind, tensor_lr][2]
        assert any("made with 8 samples per update on 2 rank(s), times 2" in line for line in said)
        assert any("12 on 3, times 3" in line for line in said)


def test_control_a_factor_left_in_the_group_compounds():
    """What this design avoids: recursive schedulers write the next rate from the one that they find."""
    optimizer = groups(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    scheduler = SCHEDULERS["cosine"](optimizer)
    for _ in range(5):
        for group in optimizer.param_groups:
            group["lr"] *= 2
        optimizer.step()
        scheduler.step()
    plain = plain_rates("cosine", 6)[-1][0]
    assert optimizer.param_groups[0]["lr"] > 8 * plain


def _batch_warm_up(rank, world_size, port, folder):
    """Batches of 4, then 16 from the third epoch on; stopped in the second and resumed."""
    used = []
    for updates, resume in ((10, False), (20, True)):
        module = Module("lambda")
        runner = trainer(
            world_size,
            port,
            lean(),
            callbacks=[
                GradientAccumulationScheduler({0: 1, 2: 4}),
                LRScaling(rule="sqrt", base_batch=4, warmup_steps=0),
            ],
            max_epochs=-1,
            max_steps=updates,
        )
        path = f"{folder}/{rank if world_size == 1 else 'all'}.ckpt"
        runner.fit(module, DataLoader(Rows(24), batch_size=2), ckpt_path=path if resume else None)
        if not resume:
            runner.save_checkpoint(path)
        used += module.optimizer.used
    return used


def test_b5_a_batch_that_grows_between_epochs_changes_the_rate_at_the_right_update(tmp_path):
    used = ranks(_batch_warm_up, 2, str(tmp_path))[0]
    plain = plain_rates("lambda", 20)
    # 6 updates an epoch; from the third epoch on 4 micro-batches make one.
    factors = [1.0] * 12 + [2.0] * 8
    for rates, base, factor in zip(used, plain, factors, strict=True):
        assert rates == pytest.approx([rate * factor for rate in base], rel=1e-12)


class LARS(torch.optim.SGD):
    """As in docs/large_batch.md: it needs whole tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.grad.mul_(0.001 * p.norm() / (p.grad.norm() + 1e-12))
        super().step()
        return loss


class Layerwise(Module):
    def configure_optimizers(self):
        return LARS(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()


def _layerwise(rank, world_size, port):
    found = []
    for zero in (0, 1, {"split": "off"}):
        module = Layerwise("lambda")
        scaling = LRScaling(base_batch=2, warmup_steps=3)
        runner = trainer(world_size, port, lean(zero=zero), callbacks=[scaling], max_steps=6)
        runner.fit(module, DataLoader(Rows(24), batch_size=2))
        found.append([p.detach().clone() for p in module.parameters()])
    return found


def test_a_layerwise_optimizer_takes_the_same_steps_with_zero():
    for plain, *sharded in ranks(_layerwise, 2):
        for parameters in sharded:
            for parameter, expected in zip(parameters, plain, strict=True):
                torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)


def _alone(rank, world_size, port):
    module, scaling = Module("lambda"), LRScaling(base_batch=1, warmup_steps=0)
    outer = {"every": 2, "optimizer": {"lr": 1.0, "momentum": 0.0}}
    runner = trainer(world_size, port, lean(outer=outer), callbacks=[scaling], max_steps=4)
    runner.fit(module, DataLoader(Rows(24), batch_size=2))
    return scaling.global_batch, module.optimizer.used[0][0]


def test_ranks_that_step_alone_have_their_own_batch():
    assert ranks(_alone, 2)[0] == (2, pytest.approx(2 * BASE[0]))


# Contradictions


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"rule": "cubic"}, "'linear' or 'sqrt' or 'none'"),
        ({"base_batch": 0}, "base_batch=0"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"warmup_epochs": float("nan")}, "warmup_epochs=nan"),
        ({"warmup_epochs": 5, "warmup_steps": 100}, "two lengths of one warm-up"),
    ],
)
def test_an_impossible_rule_is_refused(arguments, told):
    with pytest.raises(ConfigError, match=told):
        LRScaling(**arguments)


def _run(*callbacks, loader=None, optimizer=None, **kwargs):
    module = Module("lambda")
    if optimizer is not None:
        module.configure_optimizers = lambda: optimizer(module)
    runner = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **kwargs},
    )
    runner.fit(module, DataLoader(Rows(8), batch_size=2) if loader is None else loader)
    return module


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.zeros(6, dtype=torch.float64) for _ in itertools.count())


class Lists(torch.utils.data.IterableDataset):
    """Batches of its own."""

    def __iter__(self):
        return (torch.zeros(3, 6, dtype=torch.float64) for _ in range(4))


def test_a_rule_that_contradicts_the_run_is_refused_at_its_start():
    endless, lists = DataLoader(Endless(), batch_size=2), DataLoader(Lists(), batch_size=None)
    for scaling, loader, told in [
        (LRScaling(batch=7), None, "batch=7 contradicts the loader: 2 samples x 1"),
        (LRScaling(), endless, "warmup_epochs needs epochs"),
        (LRScaling(), lists, "Give lr_scaling.batch"),
    ]:
        with pytest.raises(ConfigError, match=told):
            _run(scaling, loader=loader, max_steps=1, max_epochs=-1)
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        _run(LRScaling(), LRScaling())


class Rateless(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.param_groups[-1]["lr"] = None


def test_an_optimizer_without_a_rate_is_refused_at_its_start():
    with pytest.raises(ConfigError, match=r"optimizer 0 \(Rateless\) has a group without one"):
        _run(LRScaling(base_batch=2), optimizer=lambda module: Rateless(module.parameters()))


def test_groups_that_share_one_tensor_are_multiplied_once():
    weights = []
    for rate, scaling in ((0.2, []), (0.1, [LRScaling(base_batch=1, warmup_steps=0)])):

        def shares(module, rate=rate):
            groups = [{"params": [each]} for each in module.parameters()]
            module.optimizer = torch.optim.SGD(groups, lr=torch.tensor(rate, dtype=torch.float64))
            return module.optimizer

        torch.manual_seed(0)
        weights.append(_run(*scaling, optimizer=shares).state_dict())
    torch.testing.assert_close(weights[1], weights[0])


def test_a_batch_that_the_loader_does_not_tell_can_be_given():
    scaling = LRScaling(base_batch=4, batch=12, warmup_steps=2)
    module = _run(scaling, loader=DataLoader(Lists(), batch_size=None))
    factors = [rates[0] * (1 + step) / BASE[0] for step, rates in enumerate(module.optimizer.used)]
    assert factors == pytest.approx([1, 2, 3, 3])


def test_a_smaller_batch_lowers_the_rate_at_once_and_none_leaves_it():
    for rule, expected in (("linear", 0.5), ("sqrt", 0.5**0.5), ("none", 1.0)):
        module = _run(LRScaling(rule=rule, base_batch=4))
        assert module.optimizer.used[0] == pytest.approx([rate * expected for rate in BASE])


def test_a_step_that_raises_leaves_the_users_own_rate():
    class Fails(Recording):
        def step(self, closure=None):
            super().step(closure)
            raise ValueError("in the middle of a step")

    made = []

    def fails(module):
        made.append(Fails(module.parameters(), lr=0.5))
        return made[0]

    with pytest.raises(ValueError, match="in the middle"):
        _run(LRScaling(base_batch=1, warmup_steps=0), optimizer=fails)
    assert made[0].used == [[1.0]]
    assert made[0].param_groups[0]["lr"] == 0.5


def test_a_warm_up_that_cannot_end_is_said():
    said = log_lines()
    _run(LRScaling(base_batch=1, warmup_epochs=2))
    assert any("the full rate is never reached" in line for line in said)
    said.clear()
    _run(LRScaling(base_batch=1, warmup_epochs=0.5))
    assert not any("never reached" in line for line in said)
