"""All ranks, and all restarts, write into one folder."""

import os

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from lightning_dp.app.run_dir import OneRunDir, external_rank, pinned, run_id
from tests.support.ranks import run_ranks

TEMPLATE = "${paths.log_dir}/train/${now:%Y-%m-%d}_${now:%H-%M-%S}"
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_JOB_NAME": "train",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "job7"}, "job7"),
        ({"TORCHELASTIC_RUN_ID": "job7", "LEAN_DDP_RUN_ID": "mine"}, "mine"),
        (SLURM, "slurm-77-0"),
        # An interactive shell, in which many runs share one job.
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, None),
    ],
)
def test_run_id(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run_id(os.environ) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, "${paths.log_dir}/train/x"),
        ("a/${now:%Y-%m-%d}/${now:%H-%M-%S}", "a/x"),
        ("a/${now:%Y}/${job}_${now:%H}", "a/x/${job}_x"),
        ("fixed", "fixed"),
    ],
)
def test_pinned(template, expected):
    assert pinned(template, "x") == expected


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "1", "LOCAL_RANK": "1"}, 0),  # started by Lightning, which tells the folder
        ({"TORCHELASTIC_RUN_ID": "a", "RANK": "1"}, 1),
        (SLURM, 3),
    ],
)
def test_external_rank(environment, rank, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert external_rank(os.environ) == rank


def config(folder: str = TEMPLATE) -> OmegaConf:
    """As much of Hydra's config as the callback reads."""
    OmegaConf.register_new_resolver("now", lambda _: str(os.getpid()), replace=True)
    return OmegaConf.create(
        {
            "paths": {"log_dir": "outputs"},
            "hydra": {"run": {"dir": folder}, "output_subdir": ".hydra", "job": {"name": "train"}},
        }
    )


def test_a_pinned_folder_is_the_same_after_a_restart(monkeypatch):
    monkeypatch.setenv("LEAN_DDP_RUN_ID", "job7")
    for _ in range(2):
        cfg = config()
        OneRunDir().on_run_start(cfg)
        assert cfg.hydra.run.dir == "outputs/train/job7"
        assert cfg.hydra.output_subdir == ".hydra"


def test_a_folder_that_the_user_gave_stays(monkeypatch):
    monkeypatch.setenv("LEAN_DDP_RUN_ID", "job7")
    cfg = config("mine")
    OneRunDir().on_run_start(cfg)
    assert cfg.hydra.run.dir == "mine"


def _under_torchrun(rank: int, world_size: int, port: int) -> tuple[str, str | None, str]:
    os.environ.update(
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_USE_AGENT_STORE="True",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    cfg = config()  # ${now:} is this process's number: no two ranks have the same
    OneRunDir().on_run_start(cfg)
    return cfg.hydra.run.dir, cfg.hydra.output_subdir, cfg.hydra.job.name


@pytest.mark.multi_process
def test_ranks_without_a_run_id_take_the_folder_of_rank_zero():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = run_ranks(_under_torchrun, 3, store.port, init_process_group=False)
    folders, subdirs, names = zip(*first, strict=True)
    assert len(set(folders)) == 1
    assert subdirs == (".hydra", None, None)
    assert names == ("train", "train_rank1", "train_rank2")
    restarted = run_ranks(_under_torchrun, 3, store.port, init_process_group=False)
    assert restarted == first


def _alone(rank: int, world_size: int) -> str:
    cfg = config()
    OneRunDir().on_run_start(cfg)
    return cfg.hydra.run.dir


@pytest.mark.multi_process
def test_control_ranks_that_nobody_brings_together_differ():
    assert len(set(run_ranks(_alone, 2, init_process_group=False))) == 2
