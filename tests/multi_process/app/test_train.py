"""What a run leaves behind, and that every way to start it is the same training."""

import csv
import re
import shutil

import pytest
import torch
from omegaconf import OmegaConf

from tests.multi_process.app.commands import ROOT, forked, succeed
from tests.multi_process.app.conftest import SHORT, Run

pytestmark = pytest.mark.multi_process


def weights(run: Run) -> dict[str, torch.Tensor]:
    return torch.load(run.checkpoint, weights_only=True)["state_dict"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(output: str) -> dict[str, str]:
    """The table at the end."""
    return dict(re.findall(r"│ (\S.*?) +│ (\S.*?) +│", output))


def test_two_ranks_share_one_folder_with_all_results(short_run):
    names = {path.name for path in short_run.folder.iterdir()}
    assert {".hydra", "metrics.csv", "curves.png", "confusion.png", "checkpoints"} <= names
    cfg = OmegaConf.load(short_run.folder / ".hydra" / "config.yaml")
    assert (cfg.trainer.devices, cfg.trainer.max_epochs, cfg.seed) == (2, 2, 42)
    assert cfg.strategy._target_ == "lightning_dp.LeanDDPStrategy"
    assert short_run.folder.joinpath("curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(short_run.folder.joinpath("checkpoints").glob("*.ckpt"))) == 2  # best, last


def test_metrics_are_those_of_training_validation_and_testing(short_run):
    with short_run.folder.joinpath("metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    said = {name for line in lines for name, value in line.items() if value}
    assert {"train/loss", "train/acc", "val/loss", "val/acc", "test/loss", "test/acc"} <= said
    assert 0.3 < float(next(line["test/acc"] for line in lines if line["test/acc"])) <= 1


def test_it_ends_with_a_table(short_run):
    table = rows(short_run.output)
    assert (table["ranks"], table["steps"], table["effective batch"]) == ("2", "34", "64")
    assert table["training time"].endswith(" s")
    assert float(table["test/acc"]) > 0.3


def test_only_rank_zero_shows_progress_and_results(short_run):
    assert len(re.findall(r"Epoch 1/1", short_run.output)) == 1
    assert short_run.output.count("│ ranks") == 1
    assert short_run.output.count("GPU available") == 1


def test_python_m_is_the_same_training(short_run, tmp_path):
    succeed("python", "-m", "lightning_dp.app.train", *SHORT, "hydra.run.dir=run", cwd=tmp_path)
    assert same(weights(short_run), weights(Run(tmp_path / "run", "")))


def test_torchrun_is_the_same_training_in_one_folder(short_run, tmp_path):
    output = succeed("bash", ROOT / "examples" / "from_torchrun.sh", *SHORT, cwd=tmp_path)
    (folder,) = (tmp_path / "outputs" / "train").iterdir()
    assert same(weights(short_run), weights(Run(folder, output)))
    assert rows(output)["ranks"] == "2"
    assert {"train.log", "train_rank1.log"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("seed", [42, 43])
def test_forked_ranks_are_the_same_training_and_control_another_seed_is_another(
    seed, short_run, tmp_path
):
    options = (*SHORT, f"seed={seed}", "strategy.start_method=fork", "hydra.run.dir=run")
    code, printed = forked(tmp_path, "train", *options)
    assert code == 0, printed
    assert same(weights(short_run), weights(Run(tmp_path / "run", ""))) == (seed == 42)


def test_evaluate_gives_the_test_result_of_the_run(short_run, tmp_path):
    best = next(short_run.folder.joinpath("checkpoints").glob("epoch_*.ckpt"))
    output = succeed("lean-ddp", "evaluate", f"ckpt_path={best}", cwd=tmp_path)
    trained, evaluated = rows(short_run.output), rows(output)
    assert evaluated["test/acc"] == trained["test/acc"]
    assert evaluated["test/loss"] == trained["test/loss"]


def test_own_modules_of_the_current_folder_are_trained(tmp_path):
    """``--config-dir``: our application, somebody's modules."""
    shutil.copy(ROOT / "examples" / "own_hydra_project" / "line.py", tmp_path / "mine.py")
    for group, text in {
        "model": "_target_: mine.LineModule\nlr: 0.1\n",
        "data": "_target_: mine.PointsDataModule\nbatch_size: 8\n",
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    own = ("--config-dir", "conf", "model=mine", "data=mine", "monitor.metric=loss", "test=false")
    code, printed = forked(tmp_path, "train", *own, "trainer.devices=1", "trainer.max_epochs=1")
    assert code == 0, printed
    assert rows(printed)["steps"] == "32"
    assert next(tmp_path.rglob("curves.png")).is_file()
