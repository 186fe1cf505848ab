"""Before, beside and between runs: what users do around ``fit``."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_dp
from tests.support.programs import ROOT, python, run_program
from tests.support.sampling import Learner, lean
from tests.support.trainers import ranks, trainer

TRAIN = str(ROOT / "tests" / "programs" / "train.py")


@pytest.mark.parametrize("strategy", ["lean_ddp", "lean_ddp_fork"])
@pytest.mark.parametrize(("devices", "nodes", "steps"), [(2, 2, 16), (1, 1, 64)])
def test_the_steps_of_a_run_can_be_asked_for_before_its_ranks_exist(
    strategy, devices, nodes, steps
):
    assert lightning_dp
    made = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    module = BoringModel()
    made._data_connector.attach_data(module)
    made.strategy.connect(module)
    assert made.estimated_stepping_batches == steps


@pytest.mark.multi_process
def test_one_spawned_rank_needs_no_port(tmp_path):
    run = run_program(
        python(TRAIN, str(tmp_path), "", "devices=1", "steps=4", "strategy=lean_ddp_spawn"),
        cwd=tmp_path,
    )
    assert run.code == 0, run.out
    assert run.left == []


class Buffers(Callback):
    """Makes a buffer differ between ranks in training."""

    def on_train_batch_end(self, trainer, module, *_):
        module.batches.fill_(trainer.global_rank + 1)


def _resume_or_start(rank, world_size, port, handled):
    module = Learner()
    module.register_buffer("batches", torch.zeros(1))
    made = trainer(world_size, port, strategy=lean(), callbacks=[Buffers()], max_steps=2)
    batch = {"x": torch.ones(4, dtype=torch.float64), "y": torch.ones(1, dtype=torch.float64)}
    rows = [{**batch, "i": torch.tensor(i)} for i in range(16)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    if handled:
        try:
            raise FileNotFoundError("no checkpoint yet")
        except FileNotFoundError:
            made.fit(module, loader)
    else:
        made.fit(module, loader)
    return float(module.batches)


@pytest.mark.multi_process
@pytest.mark.parametrize("handled", [False, True], ids=["plain", "in an except block"])
def test_fit_where_an_error_is_handled_makes_buffers_equal(handled):
    results = ranks(_resume_or_start, 2, handled)
    assert results[0] == results[1] != 0
