"""``outer`` in a Trainer's life: what others see in mid-round, resume, stops, scalers, what is refused."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_dp import LeanDDPStrategy
from lightning_dp.errors import ConfigError, RankFailedError
from lightning_dp.step.outer_checks import refuse_module
from tests.support.logs import log_lines
from tests.support.modules import Base
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.rounds import Saves, again, held
from tests.support.trainers import Rows, fit, lean, ranks, trainer

pytestmark = pytest.mark.multi_process
OUTER = {"every": 3}


class Net(Base):
    """AdamW, a schedule by steps, BatchNorm; shows what a validation sees."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()
        self.seen, self.rates = [], []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.loss(self.norm(batch) + self.global_rank)

    def validation_step(self, batch, batch_idx):
        self.seen.append((self.trainer.global_step, held(self)))
        self.log("val", self.loss(self.norm(batch)), sync_dist=True)

    def configure_optimizers(self):
        self.made = torch.optim.AdamW(self.parameters(), lr=0.02)
        self.schedule = StepLR(self.made, 4, 0.5)
        return [self.made], [{"scheduler": self.schedule, "interval": "step"}]


def _resumes(rank, world_size, port, folder, accumulate):
    environment = dict(os.environ)
    steps = (3, 4, 8, 9)
    options = {"max_epochs": 3 * accumulate, "accumulate_grad_batches": accumulate}
    whole = Net()
    saves = {"callbacks": lambda: [Saves(folder, steps)]}
    fit(whole, rank, world_size, port, lean(outer=OUTER), **saves, **options)
    assert_equal_on_all_ranks(whole.state_dict())
    for step in steps:
        again(environment)
        module = Net()
        path = f"{folder}/{step}.ckpt"
        t = fit(module, rank, world_size, port, lean(outer=OUTER), ckpt_path=path, **options)
        assert t.global_step == 12
        assert held(module) == held(whole), step
        assert module.rates == whole.rates[step * accumulate :]
    assert t.optimizers[0] is module.made  # D12
    assert t.lr_scheduler_configs[0].scheduler is module.schedule
    saved = torch.load(f"{folder}/4.ckpt", weights_only=True)
    if rank == 0:  # control
        torch.save({**saved, "lean_ddp": {"data": saved["lean_ddp"]["data"]}}, f"{folder}/less")
    torch.distributed.barrier()
    again(environment)
    module = Net()
    fit(module, rank, world_size, port, lean(outer=OUTER), ckpt_path=f"{folder}/less", **options)
    assert held(module) != held(whole)


def test_D5_D12_a_resumed_run_has_the_same_bits_also_in_mid_round(tmp_path):
    ranks(_resumes, 2, str(tmp_path), 1)
    ranks(_resumes, 2, str(tmp_path), 2)
    saved = [torch.load(tmp_path / f"{step}.ckpt", weights_only=True) for step in (3, 4)]
    assert [each["lean_ddp"]["outer"]["position"] for each in saved] == [0, 1]
    for name, value in saved[0]["state_dict"].items():  # of the last meeting
        assert torch.equal(value, saved[1]["state_dict"][name]), name


def _on_more_ranks(rank, world_size, port, folder, step):
    lines, module = log_lines("lightning_dp.step.outer"), Net()
    path = f"{folder}/{step}.ckpt"
    t = fit(
        module, rank, world_size, port, lean(outer=OUTER),
        max_epochs=3, ckpt_path=path, val_check_interval=1,
    )  # fmt: skip
    assert_equal_on_all_ranks(module.state_dict())
    return t.global_step, lines


def test_D5_a_round_of_other_ranks_is_finished_on_resume(tmp_path):
    def save(rank, world_size, port):
        saves = {"callbacks": lambda: [Saves(str(tmp_path), (3, 4))]}
        fit(Net(), rank, world_size, port, lean(outer=OUTER), max_epochs=3, **saves)

    ranks(save, 2)
    for step in (3, 4):
        (steps, first), *others = ranks(_on_more_ranks, 3, str(tmp_path), step)
        assert steps == 12
        assert "saved by 2 rank(s)" in first[0]
        assert not any(lines for _, lines in others)
    without = ranks(_without, 2, str(tmp_path))
    assert "1 step(s) are lost" in without[0]


def _without(rank, world_size, port, folder):
    lines = log_lines("lightning_dp.step.rounds")
    fit(Net(), rank, world_size, port, lean(), max_epochs=3, ckpt_path=f"{folder}/4.ckpt")
    return " ".join(lines)


class SavesWhileShown(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_validation_end(self, trainer, module):
        if trainer.global_step == 4:
            trainer.save_checkpoint(f"{self.folder}/shown.ckpt")
            with torch.no_grad():
                module.head.weight.fill_(7.0)  # as of a callback that puts its own weights back


def _validates(rank, world_size, port, folder):
    environment, found = dict(os.environ), []
    for path in (None, f"{folder}/shown.ckpt"):
        again(environment)
        module, loader = Net(), DataLoader(Rows(), batch_size=6)
        t = trainer(
            world_size, port, lean(outer=OUTER), max_epochs=3, val_check_interval=2,
            limit_val_batches=1, num_sanity_val_steps=1, callbacks=[SavesWhileShown(folder)],
        )  # fmt: skip
        t.fit(module, loader, loader, ckpt_path=path)
        assert_equal_on_all_ranks(module.state_dict())
        found.append((dict(module.seen), held(module)))
    (seen, end), (seen_later, end_later) = found
    assert end == end_later
    assert seen_later.items() <= seen.items()
    return seen, end


def test_a_validation_sees_the_last_meetings_weights_and_changes_nothing(tmp_path):
    (seen, end), other = ranks(_validates, 2, str(tmp_path))
    assert (seen, end) == other
    assert [*seen] == [0, *range(2, 13, 2)]
    assert seen[0] == seen[2] != seen[4]
    assert seen[4] != seen[6] == seen[8] != seen[10]
    assert seen[12] == end


class Overflows(Base):
    """Its gradients overflow once, on rank 1."""

    def __init__(self):
        super().__init__()
        self.float()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch.float())
        return loss * float("inf") if self.global_rank == 1 and batch_idx == 1 else loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


def _scales(rank, world_size, port, folder):
    environment, found = dict(os.environ), []
    for path in (None, f"{folder}/4.ckpt"):
        again(environment)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        module, saves = Overflows(), {"callbacks": lambda: [Saves(folder, (4,))]}
        strategy = lean(outer=OUTER, check_replicas_every_n_steps=1)
        fit(
            module,
            rank,
            world_size,
            port,
            strategy,
            plugins=[plugin],
            ckpt_path=path,
            max_epochs=2,
            **saves,
        )
        assert_equal_on_all_ranks(module.state_dict())
        found.append((scaler.get_scale(), held(module)))
    assert found[0] == found[1]  # each rank's own scale is in the checkpoint
    return found[0][0]


def test_scalers_may_decide_differently_and_ranks_still_meet(tmp_path):
    assert ranks(_scales, 2, str(tmp_path)) == [1024.0, 256.0]


class Stops(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def _stops(rank, world_size, port, folder):
    environment = dict(os.environ)
    whole = Stops()
    whole.stop_at = -1
    fit(whole, rank, world_size, port, lean(outer={"every": 50}), max_epochs=20)
    stopped, code, at = Stops(), 0, []
    for path in (None, "last"):
        again(environment)
        stopped = Stops()
        stopped.stop_at = 5 if rank == 1 and path is None else -1
        saves = [ModelCheckpoint(folder, save_last=True, save_top_k=0)]
        t = trainer(
            world_size, port, lean(outer={"every": 50}), folder, enable_checkpointing=True,
            max_epochs=20, callbacks=saves,
        )  # fmt: skip
        loader = DataLoader(Rows(), batch_size=6)
        try:
            t.fit(stopped, loader, ckpt_path=path)
        except SystemExit as stop:
            code = stop.code
        at.append(t.global_step)
        if path is None:
            assert code == 143
            torch.distributed.barrier()
    assert held(stopped) == held(whole)
    return at


def test_D10_asked_to_stop_in_mid_round_all_ranks_stop_at_one_step_and_lose_nothing(tmp_path):
    first, second = ranks(_stops, 2, str(tmp_path))
    assert first == second
    assert 5 <= first[0] < 80
    assert first[1] == 80


class Fails(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 4:
            raise ValueError("in mid-round")
        return super().training_step(batch, batch_idx)


def _fails(rank, world_size, port):
    with pytest.raises(ValueError if rank == 1 else RankFailedError, match="in mid-round"):
        fit(Fails(), rank, world_size, port, lean(outer={"every": 10**6}), max_epochs=10**6)


def test_D6_an_error_in_mid_round_ends_ranks_that_would_not_meet_for_long():
    ranks(_fails, 2)


def _alone(rank, world_size, port):
    environment, lines, found = dict(os.environ), log_lines("lightning_dp.step.rounds"), []
    for outer in (OUTER, None):
        again(environment)
        module = Net()
        fit(module, rank, world_size, port, lean(outer=outer), max_epochs=2)
        found.append(held(module))
    assert found[0] == found[1]
    return lines


def test_D11_one_rank_trains_as_without_and_says_so_once():
    (lines,) = ranks(_alone, 1)
    assert [line for line in lines if "outer has no effect with one rank" in line] == lines[:1]


class Synced(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(6).double()


def _refused(rank, world_size, port):
    with pytest.raises(ConfigError, match="outer and SyncBatchNorm"):
        fit(Net(), rank, world_size, port, lean(outer=OUTER), sync_batchnorm=True)


def test_what_cannot_train_with_few_meetings_is_refused_at_the_start():
    ranks(_refused, 2)
    for module, callbacks, says in (
        (Synced(), [], r"SyncBatchNorm \('norm'\)"),
        (Net(), [WeightAveraging()], "averages weights while training"),
        (Net(), [], "schedule-free"),
    ):
        modes = {"train": lambda: None} if says == "schedule-free" else {}
        runner = SimpleNamespace(callbacks=callbacks, optimizers=[SimpleNamespace(**modes)])
        with pytest.raises(ConfigError, match=f"outer and .*{says}"):
            refuse_module(module, runner)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"outer": {"optimizer": {"lr": 1.0}}}, "outer needs 'every'"),
        ({"outer": {"every": 0}}, "outer.every=0 is not possible"),
        ({"outer": {"every": 5, "fragment": 2}}, "outer has no 'fragment'; it takes 'every'"),
        ({"outer": {"every": 5, "fragments": 6}}, "outer.fragments=6 is more than outer.every=5"),
        (
            {"outer": {"every": 5, "fragments": 2, "delay": 3}},
            r"more than the 2 step\(s\) from one",
        ),
        ({"outer": {"every": 5, "mix": 1.0}}, "outer.mix=1.0 is not possible"),
        ({"outer": {"every": 5, "optimizer": {"beta": 1}}}, "outer.optimizer has no 'beta'"),
        (
            {"outer": {"every": 5, "optimizer": {"momentum": 0, "nesterov": True}}},
            "Give it momentum",
        ),
        ({"outer": {"every": 5}, "ddp_comm_hook": print}, "outer and ddp_comm_hook cannot go"),
        ({"outer": {"every": 5}, "zero": 1}, "zero=1 and outer exclude each other"),
        (
            {"ddp_comm_state": post_localSGD_hook.PostLocalSGDState(None, None, 4)},
            "which is outer",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(options, says):
    with pytest.raises(ConfigError, match=says):
        LeanDDPStrategy(**options)


def test_torchs_post_local_sgd_is_an_outer_step_that_averages():
    with pytest.warns(FutureWarning, match=r"post-local SGD is now outer: write outer=.'every': 4"):
        strategy = LeanDDPStrategy(
            ddp_comm_hook=post_localSGD_hook.post_localSGD_hook,
            ddp_comm_state=post_localSGD_hook.PostLocalSGDState(None, None, 8),
            model_averaging_period=4,
        )
    averaging = {"lr": 1.0, "momentum": 0}
    assert strategy.options.outer == {"every": 4, "optimizer": averaging, "start_after": 8}
    assert not strategy._engine.hook.given
