"""Communication hooks through the Trainer: PowerSGD resumes from a checkpoint.

ddp: ignores hooks on a CPU; forgets PowerSGD's state in checkpoints.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.support.logs import log_lines
from tests.support.modules import Base
from tests.support.parity import as_bytes, assert_equal_on_all_ranks
from tests.support.ranks import RankError
from tests.support.trainers import fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class Wide(Base):
    """Matrices that PowerSGD compresses, in several buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.backbone = torch.nn.Sequential(
            *[torch.nn.Linear(6, 24), torch.nn.Linear(24, 8)]
        ).double()
        for _ in range(3):
            self.backbone.insert(1, torch.nn.Linear(24, 24).double())


def power():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def strategy(state):
    return lean(
        ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state, bucket_cap_mb=0.006
    )


def _weights(module):
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    return {name: as_bytes(p) for name, p in module.named_parameters()}


class Saves(Callback):
    """A checkpoint while the run goes on, after the first epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)
            trainer.save_checkpoint(f"{self.path}.weights", weights_only=True)


def _saving(rank, world_size, port, path):
    module = Wide()
    fit(
        module,
        rank,
        world_size,
        port,
        strategy(power()),
        callbacks=lambda: [Saves(path)],
        max_epochs=3,
    )
    return _weights(module)


def _resumed(rank, world_size, port, path, forget):
    records = log_lines()
    if forget:  # control
        kept = torch.load(path, weights_only=True)
        del kept["lean_ddp"]["engine"]
        path = f"{path}.forgetful{rank}"
        torch.save(kept, path)
    module = Wide()
    fit(module, rank, world_size, port, strategy(power()), max_epochs=3, ckpt_path=path)
    return _weights(module), [text for text in records if "hook" in text]


def test_power_sgd_resumes_from_a_checkpoint_with_the_same_bits(tmp_path):
    path = str(tmp_path / "last.ckpt")
    whole = ranks(_saving, 2, path)
    saved = torch.load(path, weights_only=True)["lean_ddp"]["engine"]["hook"]
    assert saved["world_size"] == 2
    assert saved["common"]["iter"] == 4
    assert len(saved["per_rank"]["error_dict"]) > 2
    assert "engine" not in torch.load(f"{path}.weights", weights_only=True).get("lean_ddp", {})
    for weights, told in ranks(_resumed, 2, path, False):
        assert weights == whole[0]
        assert not told
    assert ranks(_resumed, 2, path, True)[0][0] != whole[0], (
        "control: without the state it is another run"
    )


def test_power_sgd_resumes_on_another_number_of_ranks_and_says_what_it_lost(tmp_path):
    path = str(tmp_path / "last.ckpt")
    ranks(_saving, 2, path)
    found = ranks(_resumed, 3, path, False)
    assert ["error_dict of 2 rank(s)" in " ".join(told) for _, told in found] == [
        True,
        False,
        False,
    ]


def _fit_twice(rank, world_size, port):
    state = power()
    environment = dict(os.environ)
    for epochs, frozen in ((2, True), (2, False)):  # the second fit has other buckets
        os.environ.update(environment)  # Lightning's environment forgets its variables after a fit
        module = Wide()
        module.backbone[0].requires_grad_(not frozen)
        fit(module, rank, world_size, port, strategy(state), max_epochs=epochs)
        _weights(module)
    assert state.iter == 16


def test_a_second_fit_begins_with_empty_buckets():
    ranks(_fit_twice, 2)


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [
        (default_hooks.fp16_compress_hook, None),
        (functools.partial(default_hooks.bf16_compress_hook), None),
        (default_hooks.allreduce_hook, default_hooks.fp16_compress_wrapper),
    ],
)
def test_other_hooks_through_the_trainer(hook, wrapper):
    def run(rank, world_size, port):
        module = Base()
        options = {
            "ddp_comm_hook": hook,
            "ddp_comm_wrapper": wrapper,
            "check_replicas_every_n_steps": 1,
        }
        fit(
            module, rank, world_size, port, lean(**options), accumulate_grad_batches=2, max_epochs=2
        )
        return _weights(module)

    first, second = ranks(run, 2)
    assert first == second


def test_a_hook_that_cannot_work_is_refused_with_its_reason():
    def run(rank, world_size, port):
        hook = powerSGD_hook.batched_powerSGD_hook
        fit(Base(), rank, world_size, port, lean(ddp_comm_hook=hook, ddp_comm_state=power()))

    with pytest.raises(RankError, match="use powerSGD_hook"):
        ranks(run, 2)
