"""Asked to stop: all ranks stop at the same step, a checkpoint is there, exit code 143."""

import logging
import os
import random
import signal
import threading
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning_utilities.core import rank_zero
from torch.utils.data import DataLoader

from lightning_dp import LeanDDPStrategy
from tests.support.logs import log_lines
from tests.support.ranks import run_ranks
from tests.support.sampling import Numbers, ValHookLearner
from tests.support.trainers import free_port, lean, ranks, trainer

pytestmark = pytest.mark.multi_process


class Slow(ValHookLearner):
    """Its batches take a while; asks its own process to stop at a certain batch."""

    def __init__(self, loaders, step_s, stop_at=None, number=signal.SIGTERM):
        super().__init__(loaders)
        self.number = number
        self.step_s = step_s
        self.stop_at = stop_at
        self.counts = {"train": 0, "val": 0}

    def pass_batch(self, stage):
        time.sleep(self.step_s)
        self.counts[stage] += 1
        if self.stop_at == (stage, self.counts[stage]):
            os.kill(os.getpid(), self.number)

    def training_step(self, batch, batch_idx):
        self.pass_batch("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.pass_batch("val")
        return super().validation_step(batch, batch_idx)


class Manual(Slow):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Events(Callback):
    """What happened, in order: ("train", epoch, batch indices), ("val", epoch, batches), ("epoch", n)."""

    def __init__(self):
        self.events = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.events.append(("train", trainer.current_epoch, batch["i"].tolist()))

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.events.append(("val", trainer.current_epoch, len(module.evaluated)))
            module.evaluated.clear()

    def on_train_epoch_end(self, trainer, module):
        self.events.append(("epoch", trainer.current_epoch))


def fit(rank, world_size, port, root, kind, stops, resume=False, step_s=0.02, n_val=24, **options):
    """Train; return how it ended, at which step, what happened and the weights.

    ``stops`` tells which ranks are asked to stop: after seconds, or at a batch of a stage.
    """
    events = Events()
    loaders = {
        "train": lambda: DataLoader(Numbers(48), batch_size=2),
        "val": lambda: DataLoader(Numbers(n_val), batch_size=2),
    }
    stop = stops.get(rank)
    module = kind(loaders, step_s * (1 + rank), stop if isinstance(stop, tuple) else None)
    checkpoint = ModelCheckpoint(root, save_last=True, every_n_epochs=1, save_top_k=0)
    made = trainer(
        world_size,
        port,
        root=root,
        enable_checkpointing=True,
        callbacks=[events, checkpoint],
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **options},
    )
    before = signal.SIG_IGN  # one that arrives after the end is of no interest here
    signal.signal(signal.SIGTERM, before)
    timer = threading.Timer(
        stop if isinstance(stop, float) else 3600, os.kill, (os.getpid(), signal.SIGTERM)
    )
    timer.daemon = True
    timer.start()
    code = 0
    try:
        made.fit(module, ckpt_path="last" if resume else None)
    except SystemExit as stopped:
        code = stopped.code
    timer.cancel()
    assert "_broadcast_sigterm_tensor" not in vars(made.fit_loop.epoch_loop)  # given back
    assert "on_batch_end" not in vars(made._logger_connector)
    assert signal.getsignal(signal.SIGTERM) == before
    return code, made.global_step, events.events, module.net.weight.detach().flatten().tolist()


def checkpoints(root):
    found = sorted(root.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert not list(root.glob(".*lean_ddp*"))
    return found


@pytest.mark.parametrize("kind", [Slow, Manual])
@pytest.mark.parametrize("receivers", [(0,), (1,), (0, 1)])
def test_all_ranks_stop_at_one_step_with_a_checkpoint(kind, receivers, tmp_path):
    stops = {rank: 0.6 + random.random() for rank in receivers}
    port = free_port()

    def run(rank, world_size):
        return fit(rank, world_size, port, tmp_path, kind, stops, max_epochs=50)

    results = run_ranks(run, 2, init_process_group=False, grace_s=10)
    codes, steps, _, weights = zip(*results, strict=True)
    assert set(codes) == {143}, stops
    assert len(set(steps)) == 1
    assert 0 <= steps[0] < 600
    saved = torch.load(checkpoints(tmp_path)[-1], weights_only=False)
    assert saved["global_step"] == steps[0]
    assert weights[0] == weights[1] == saved["state_dict"]["net.weight"].flatten().tolist()


@pytest.mark.parametrize(
    ("kind", "world_size", "stop", "options"),
    [
        pytest.param(Slow, 2, ("train", 3), {}, id="in training"),
        pytest.param(Slow, 2, ("train", 12), {}, id="in the last batch of an epoch"),
        pytest.param(Slow, 2, ("val", 2), {}, id="in a short validation, which ends"),
        pytest.param(
            Slow, 3, ("val", 4), {"n_val": 300}, id="in a long validation, which is redone"
        ),
        pytest.param(Slow, 2, ("train", 7), {"accumulate_grad_batches": 5}, id="in a window"),
        pytest.param(
            Slow,
            2,
            ("val", 2),
            {"accumulate_grad_batches": 5, "val_check_interval": 3, "n_val": 100},
            id="in a validation in the middle of a window",
        ),
        pytest.param(Manual, 2, ("train", 3), {"val_check_interval": 4}, id="manual optimization"),
        pytest.param(Slow, 1, ("train", 5), {"val_check_interval": 5}, id="a world of one"),
    ],
)
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(
    kind, world_size, stop, options, tmp_path
):
    def run(root, stops, resume, step_s):
        port = free_port()

        def rank_runs(rank, world_size):
            return fit(rank, world_size, port, root, kind, stops, resume, step_s, **options)

        return run_ranks(rank_runs, world_size, init_process_group=False, grace_s=10)

    whole = run(tmp_path / "whole", {}, False, 0.0)
    first = run(tmp_path / "parts", {world_size - 1: stop}, False, 0.02)
    second = run(tmp_path / "parts", {}, True, 0.0)
    assert {result[0] for result in first} == {143}
    assert {result[0] for result in second} == {0}
    for rank in range(world_size):
        assert first[rank][2] + second[rank][2] == whole[rank][2]
        assert second[rank][1:2] + second[rank][3:] == whole[rank][1:2] + whole[rank][3:]


def test_a_resumed_run_can_be_stopped_again_in_the_same_epoch(tmp_path):
    def run(resume, stops):
        port = free_port()

        def rank_runs(rank, world_size):
            return fit(rank, world_size, port, tmp_path, Slow, stops, resume)

        return run_ranks(rank_runs, 2, init_process_group=False, grace_s=10)

    pieces = [run(False, {0: ("train", 2)}), run(True, {1: ("train", 3)}), run(True, {})]
    assert [{result[0] for result in piece} for piece in pieces] == [{143}, {143}, {0}]
    assert pieces[1][0][1] < 12
    seen = [entry for piece in pieces for entry in piece[0][2] if entry[0] == "train"]
    assert seen == [("train", epoch, batch) for epoch in (0, 1) for batch in batches_of(0, 2)]


def batches_of(rank, world_size):
    return [[i, i + world_size] for i in range(rank, 48, 2 * world_size)]


def _ignored(rank, world_size, port, root, on_preempt):
    stops = {1: ("train", 3)}
    strategy = lean(on_preempt=on_preempt)
    return fit(rank, world_size, port, root, Slow, stops, strategy=strategy)


@pytest.mark.parametrize(
    ("on_preempt", "code", "saved"), [("stop", 143, 0), ("checkpoint", 143, 1)]
)
def test_on_preempt_says_whether_a_checkpoint_is_written(on_preempt, code, saved, tmp_path):
    results = ranks(_ignored, 2, tmp_path, on_preempt)
    assert {result[0] for result in results} == {code}
    assert len(checkpoints(tmp_path)) == saved


def _without_checkpoints(rank, world_size, port, root):
    logging.disable(logging.NOTSET)
    # Which logger Lightning writes to depends on which of its modules was imported last.
    told = log_lines(rank_zero.log)
    rank_zero.log.disabled = False
    module = Slow(
        {"train": lambda: DataLoader(Numbers(48), batch_size=2)},
        0.02,
        ("train", 3) if rank else None,
    )
    module.val_dataloader = None
    made = trainer(world_size, port, root=root, max_epochs=2, limit_val_batches=0)
    with pytest.raises(SystemExit) as stopped:
        made.fit(module)
    return stopped.value.code, "\n".join(told)


def test_a_run_that_asked_for_no_files_leaves_none_when_it_is_stopped(tmp_path):
    results = ranks(_without_checkpoints, 2, tmp_path, grace_s=10)
    assert [code for code, _ in results] == [143, 143]
    assert "nothing was saved, because checkpointing is off" in results[0][1]
    assert list(tmp_path.rglob("*.ckpt")) == []


def _on_slurm(rank, world_size, port, root):
    os.environ.update(
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_JOB_NAME="train",
        SLURM_JOB_ID="4711",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        SLURM_NODELIST="127.0.0.1",
        PATH=f"{root}:{os.environ['PATH']}",
    )
    module = Slow(
        {"train": lambda: DataLoader(Numbers(48), batch_size=2)},
        0.02,
        ("train", 10) if rank == 1 else None,
        signal.SIGUSR1,
    )
    module.val_dataloader = None
    strategy = LeanDDPStrategy(cluster_environment=SLURMEnvironment())
    made = trainer(
        world_size, port, strategy=strategy, root=root, max_epochs=3, limit_val_batches=0
    )
    with pytest.raises(SystemExit) as stopped:
        made.fit(module)
    return stopped.value.code, made.global_step


def test_slurms_requeue_signal_saves_and_requeues_outside_of_the_handler(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/calls\n")
    scontrol.chmod(0o755)
    results = ranks(_on_slurm, 2, tmp_path, grace_s=10)
    (code, step), other = results
    assert other == (code, step)
    assert code == 143
    assert (tmp_path / "calls").read_text() == "requeue 4711\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == step


def _count_broadcasts(rank, world_size, port, root):
    calls = []
    plain = torch.distributed.broadcast
    torch.distributed.broadcast = lambda *a, **k: calls.append(a) or plain(*a, **k)
    code, steps, _, _ = fit(rank, world_size, port, root, Slow, {}, max_epochs=1, step_s=0.0)
    return code, steps, len(calls)


def test_no_stop_flag_is_broadcast_per_batch(tmp_path):
    """``ddp`` sends one before each micro-batch, which blocks the host."""
    for code, steps, broadcasts in ranks(_count_broadcasts, 2, tmp_path):
        assert (code, steps) == (0, 12)
        assert broadcasts < 12
