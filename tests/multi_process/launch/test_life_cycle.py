"""Before, beside and between runs: what users do around ``fit``."""

import socket

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics import MeanMetric

import lightning_dp
from lightning_dp.launch import processes
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


class Measured(Learner):
    """Logs a metric that meets the other ranks wherever there is a group."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def test_step(self, batch, batch_idx):
        self.mean(batch["i"].float())
        self.log("mean", self.mean, on_epoch=True)


def _one_device_on_rank_0(rank, world_size, port):
    module = Measured()
    batch = {"x": torch.ones(4, dtype=torch.float64), "y": torch.ones(1, dtype=torch.float64)}
    loader = torch.utils.data.DataLoader([{**batch, "i": torch.tensor(i)} for i in range(7)])
    found = []
    for _ in range(2):
        trainer(world_size, port, strategy=lean(), max_steps=2).fit(module, loader)
        if rank == 0:
            with pytest.MonkeyPatch.context() as alone:
                alone.delenv("WORLD_SIZE", raising=False)
                one = pl.Trainer(
                    accelerator="cpu", devices=1, logger=False, enable_progress_bar=False
                )
                found.append(one.test(module, loader, verbose=False)[0]["mean"])
        assert dist.get_world_size() == world_size, "the group is there again"
    return found


@pytest.mark.multi_process
def test_one_device_after_two_on_one_rank_only_and_two_again():
    assert ranks(_one_device_on_rank_0, 2) == [[3.0, 3.0], []]


class Raises(BoringModel):
    def on_train_start(self):
        raise ValueError("of the user")


@pytest.mark.multi_process
def test_a_failed_run_leaves_no_store_that_ranks_of_a_later_one_would_inherit(monkeypatch):
    ports, host = [], processes.host_store

    def hosts():
        hosted = host()
        ports.append(hosted.port)
        return hosted

    monkeypatch.setattr(processes, "host_store", hosts)
    made = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="lean_ddp_fork",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    with pytest.raises(Exception, match="of the user") as held:  # its frames live on
        made.fit(Raises())
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", ports[0])) != 0, held
