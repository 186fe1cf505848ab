"""Failures inside of a Trainer: every rank ends soon, with the cause, and its hooks have run."""

import functools
import itertools
import os
import signal
import threading
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_dp.errors import LaunchError, RankFailedError
from tests.support import grounds
from tests.support.logs import log_lines
from tests.support.ranks import LIMIT_S, RankError, run_ranks
from tests.support.sampling import Numbers, ValHookLearner
from tests.support.trainers import free_port, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class Failing(ValHookLearner):
    """Does ``act`` at a place, on one rank."""

    def __init__(self, rank, place, act, own_rank):
        loaders = {
            stage: lambda: DataLoader(Numbers(24), batch_size=2) for stage in ("train", "val")
        }
        super().__init__(loaders)
        self.here = place if rank == own_rank else ""
        self.act = act
        self.batches = 0

    def reach(self, place):
        if self.here == place:
            self.act()

    def setup(self, stage):
        self.reach("setup")

    def configure_model(self):
        self.reach("configure_model")

    def train_dataloader(self):
        self.reach("train_dataloader")
        return super().train_dataloader()

    def val_dataloader(self):
        self.reach("val_dataloader")
        return super().val_dataloader()

    def training_step(self, batch, batch_idx):
        self.batches += 1
        if self.batches == 3:
            self.reach("forward")
        loss = super().training_step(batch, batch_idx)
        if self.batches == 3 and self.here == "backward":
            loss.register_hook(lambda grad: self.act())
        return loss

    def validation_step(self, batch, batch_idx):
        self.reach("validation")
        return super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        self.reach("save")


class Ends(Callback):
    """Notes which hooks ran at the end."""

    def __init__(self):
        self.seen = []

    def on_exception(self, trainer, module, exception):
        self.seen.append(type(exception).__name__)

    def teardown(self, trainer, module, stage):
        self.seen.append("teardown")


def boom():
    raise ValueError("boom in user code")


def die():
    os._exit(3)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fit(rank, world_size, port, root, failing, place, act, callbacks=(), **options):
    ends = Ends()
    begin = time.monotonic()
    told = {}
    made = trainer(
        world_size,
        port,
        root=root,
        enable_checkpointing=True,
        callbacks=[ends, ModelCheckpoint(root, every_n_train_steps=4, save_last=True), *callbacks],
        num_sanity_val_steps=0,
        **{"strategy": lean(error_grace_s=1.0), **options},
    )
    try:
        made.fit(Failing(rank, place, act, failing))
    except BaseException as error:
        told["error"] = error
    finally:
        told["seconds"] = time.monotonic() - begin
    return {**told, "seen": ends.seen}


PLACES = ["setup", "forward", "backward", "validation", "save"]
# Meanwhile others are about to make process groups, in which nobody can be interrupted.
BEFORE_GROUPS = [(1, "configure_model"), (0, "train_dataloader"), (1, "val_dataloader")]


@pytest.mark.parametrize(("failing", "place"), [*itertools.product([0, 1], PLACES), *BEFORE_GROUPS])
def test_an_error_of_one_rank_is_an_error_of_all(failing, place, tmp_path):
    results = ranks(fit, 2, tmp_path, failing, place, boom, grace_s=12)
    for rank, told in enumerate(results):
        assert told["seconds"] < LIMIT_S
        if rank == failing:
            assert isinstance(told["error"], ValueError)
            assert told["seen"] == ["ValueError"]
        else:
            assert isinstance(told["error"], RankFailedError)
            assert told["error"].rank == failing
            assert "boom in user code" in told["error"].remote_traceback
            assert told["seen"] == ["RankFailedError"]


def _note(rank, world_size, port, root, *args):
    told = fit(rank, world_size, port, *args)
    (root / f"rank{rank}").write_text(f"{type(told['error']).__name__} {told['error'].rank}")


@pytest.mark.parametrize(
    ("failing", "place", "act"),
    [(0, "forward", kill), (1, "backward", die), (1, "validation", kill), (1, "setup", die)],
)
def test_a_rank_that_dies_is_named_by_the_others(failing, place, act, tmp_path):
    begin = time.monotonic()
    with pytest.raises(RankError):
        ranks(_note, 3, tmp_path, tmp_path / "run", failing, place, act, grace_s=12)
    assert time.monotonic() - begin < 12
    for rank in {0, 1, 2} - {failing}:
        assert (tmp_path / f"rank{rank}").read_text() == f"RankFailedError {failing}"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_checkpoint_on_exception_of_one_rank_does_not_hide_the_error(failing, tmp_path):
    saving = [OnExceptionCheckpoint(tmp_path, "on_exception")]
    args = (free_port(), tmp_path, failing, "forward", boom, saving)
    results = run_ranks(fit, 2, *args, init_process_group=False, grace_s=12)
    assert isinstance(results[failing]["error"], ValueError)
    assert isinstance(results[1 - failing]["error"], RankFailedError)
    assert all(told["seconds"] < LIMIT_S for told in results)
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == 2  # rank 0 writes, as always; nobody waited for the other


class SaveOnRankZero(Callback):
    def __init__(self, hook, path):
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.is_global_zero and trainer.global_step in (2, 6):
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
def test_saving_on_rank_zero_only_ends_with_the_cause(hook, tmp_path):
    callbacks = [SaveOnRankZero(hook, tmp_path / "mine.ckpt")]
    args = (free_port(), tmp_path, -1, "", boom, callbacks)
    results = run_ranks(fit, 2, *args, init_process_group=False, grace_s=15, expect_failure=False)
    for told in results:
        assert isinstance(told["error"], RankFailedError), told
        assert "save_checkpoint" in str(told["error"])
        assert "every rank" in str(told["error"])
        assert told["seconds"] < LIMIT_S


def _second_fit(rank, world_size, port, root):
    first = fit(rank, world_size, port, root, -1, "", boom, max_steps=4)
    second = fit(rank, world_size, port, root, 1, "forward", boom)
    return first, second


def test_a_second_trainer_of_the_program_is_guarded_too(tmp_path):
    results = ranks(_second_fit, 2, tmp_path)
    for rank, (first, second) in enumerate(results):
        assert "error" not in first
        assert first["seen"] == ["teardown"]
        expected = ValueError if rank == 1 else RankFailedError
        assert isinstance(second["error"], expected)


def _missing(rank, world_size, port, root):
    if rank == 1:
        return None
    strategy = lean(rendezvous_timeout_s=2.0)
    made = trainer(world_size, port, strategy=strategy, root=root)
    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        made.fit(Failing(rank, "", boom, -1))
    return str(caught.value), time.monotonic() - begin


def test_a_rank_that_never_comes_is_named(tmp_path):
    message, seconds = ranks(_missing, 2, tmp_path, grace_s=10)[0]
    assert "Missing: 1." in message
    assert seconds < LIMIT_S


def _environment(rank, world_size, variables, devices):
    from lightning.pytorch import Trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    made = Trainer(
        accelerator="cpu", devices=devices, strategy="lean_ddp", logger=False, max_steps=1
    )
    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        made.fit(Failing(0, "", boom, -1))
    return str(caught.value), time.monotonic() - begin


SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("variables", "devices", "says"),
    [
        (SLURM, 2, ["SLURM reports 1 task", "devices=2", "--ntasks-per-node=2", "interactive"]),
        (
            {"LOCAL_RANK": "0"},
            2,
            ["LOCAL_RANK=0", "local rank(s) 1 are missing", "unset LOCAL_RANK"],
        ),
        ({"LEAN_DDP_PID": "1", "LOCAL_RANK": "0"}, 2, ["inherited", "env -u"]),
        ({}, 2, ["pytest", "lean_ddp_fork"]),
    ],
    ids=["slurm", "stale LOCAL_RANK", "nested", "pytest"],
)
@pytest.mark.cpu_only("reads variables")
def test_an_environment_that_cannot_work_is_refused_at_once(variables, devices, says):
    message, seconds = run_ranks(_environment, 1, variables, devices, init_process_group=False)[0]
    for part in says:
        assert part in message
    assert seconds < LIMIT_S


def _stall(rank, world_size, port, root):
    lines = log_lines("lightning_dp.faults")
    act = functools.partial(time.sleep, 4)
    strategy = lean(stall_report_s=2.0)
    told = fit(rank, world_size, port, root, 1, "forward", act, strategy=strategy, max_steps=4)
    assert "error" not in told
    return "\n".join(lines)


def test_a_stall_names_bucket_parameters_and_the_rank_that_has_not_come(tmp_path):
    waiting, late = ranks(_stall, 2, tmp_path)
    if grounds.CURRENT is grounds.CPU:
        assert "the gradients of step 2 (bucket 0)" in waiting
        assert "'net.weight'" in waiting
    else:  # a reduction opens with a message there
        assert "the ranks to say what they send in step 2" in waiting
    assert "rank 1 has not come: it is running its own code at fit, train, step 2" in waiting
    assert late == ""


def _alone(rank, world_size, root):
    from lightning.pytorch import Trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    before = dict(os.environ)
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append([t.name for t in threading.enumerate() if t.name.startswith("lean")])
            seen.append(trainer.strategy._controller._guard.channel)

    made = Trainer(
        accelerator="cpu",
        devices=1,
        strategy="lean_ddp",
        logger=False,
        max_steps=2,
        callbacks=[Look()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    made.fit(Failing(0, "", boom, -1))
    changed = {key for key in os.environ if os.environ[key] != before.get(key)}
    return made.global_step, seen, changed - {"PL_GLOBAL_SEED"}


@pytest.mark.cpu_only("starts a Trainer of its own")
def test_a_world_of_one_has_no_watch_and_no_store(tmp_path):
    steps, seen, changed = run_ranks(_alone, 1, tmp_path, init_process_group=False)[0]
    assert steps == 2
    assert seen == [[], None] * 2
    assert not {name for name in changed if name.startswith(("LEAN", "RANK", "LOCAL"))}
