"""What only some ranks call is an error on all of them within seconds: by kind, key or shape."""

import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_dp.errors import RankFailedError
from tests.support.ranks import run_ranks
from tests.support.sampling import Numbers, ValHookLearner, lean
from tests.support.trainers import free_port, trainer

pytestmark = pytest.mark.multi_process


def on_one_rank(hook, act):
    """A callback that calls ``act(trainer, module)`` in ``hook``, on rank 1 only, in the second batch."""

    class OnOneRank(Callback):
        batches = 0

        def run(self, trainer, module, *_):
            self.batches += 1
            due = "batch" not in hook or self.batches == 2
            if trainer.global_rank == 1 and due:
                act(trainer, module)

    setattr(OnOneRank, hook, OnOneRank.run)
    return OnOneRank()


def log_dir(trainer, module):
    return trainer.log_dir


def barrier(trainer, module):
    trainer.strategy.barrier()


def log_on_step(trainer, module):
    module.log("mine", torch.tensor(1.0), sync_dist=True, on_step=True, on_epoch=False)


def log_on_epoch(trainer, module):
    module.log("mine", torch.tensor(1.0), sync_dist=True, on_step=False, on_epoch=True)


def gather(trainer, module):
    module.all_gather(torch.ones(2))


def save(trainer, module):
    trainer.save_checkpoint("/nonexistent/never")


class KeysDiffer(ValHookLearner):
    def validation_step(self, batch, batch_idx):
        self.log(f"of_{self.global_rank}", 1.0, sync_dist=True, on_epoch=True, batch_size=2)


class ShapesDiffer(ValHookLearner):
    def on_train_batch_end(self, *_):
        self.trainer.strategy.reduce(torch.ones(1 + self.global_rank))


def fit(rank, world_size, port, root, module, callback):
    loaders = {stage: lambda: DataLoader(Numbers(16), batch_size=2) for stage in ("train", "val")}
    made = trainer(
        world_size,
        port,
        root=root,
        callbacks=[callback] if callback else [],
        strategy=lean(error_grace_s=1.0),
        num_sanity_val_steps=0,
        max_epochs=2,
    )
    begin = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        made.fit(module(loaders))
    return time.monotonic() - begin, str(caught.value)


@pytest.mark.parametrize(
    ("hook", "act", "says"),
    [
        ("on_fit_start", log_dir, "broadcast (test_deadlocks.py:"),
        ("on_train_start", barrier, "a barrier (test_deadlocks.py:"),
        ("on_before_zero_grad", log_on_step, "reduce of 'mine'"),
        ("on_train_batch_end", log_on_step, "reduce of 'mine'"),
        ("on_train_batch_end", gather, "all_gather torch.float32 (test_deadlocks.py:"),
        ("on_train_epoch_start", log_on_epoch, "reduce of 'mine'"),
        ("on_validation_epoch_end", log_on_epoch, "reduce of 'mine'"),
        ("on_train_batch_start", save, "(test_deadlocks.py:"),
    ],
)
def test_what_one_rank_calls_alone_is_named_on_all(hook, act, says, tmp_path):
    results = run_ranks(
        *(fit, 2, free_port(), tmp_path, ValHookLearner, on_one_rank(hook, act)),
        init_process_group=False,
        grace_s=15,
    )
    for seconds, message in results:
        assert says in message
        assert "rank 0" in message
        assert "rank 1" in message
        assert "every rank" in message
        assert seconds < 15


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (KeysDiffer, ("reduce of 'of_0' ()", "reduce of 'of_1' ()")),
        (ShapesDiffer, ("reduce (1,) torch.float32", "reduce (2,) torch.float32")),
    ],
)
def test_other_keys_and_other_shapes_are_no_slow_network(module, says, tmp_path):
    results = run_ranks(
        fit, 2, free_port(), tmp_path, module, None, init_process_group=False, grace_s=15
    )
    for seconds, message in results:
        assert all(text in message for text in says)
        assert seconds < 15
