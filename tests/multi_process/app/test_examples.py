"""The scripts that a newcomer runs first."""

import re

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.multi_process.app.commands import ROOT, succeed

OWN = ROOT / "examples" / "own_hydra_project" / "conf"


@pytest.mark.multi_process
def test_minimal_learns_to_read_digits(tmp_path):
    output = succeed("python", ROOT / "examples" / "minimal.py", cwd=tmp_path)
    assert float(re.search(r"test/acc +│ +([\d.]+)", output)[1]) > 0.95


@pytest.mark.multi_process
def test_lightning_cli_trains_on_two_ranks(tmp_path):
    """33 batches of 32 rows: 17 steps on each of two ranks."""
    options = "--trainer.strategy lightning_dp.LeanDDPStrategy --trainer.strategy.bucket_cap_mb 8"
    succeed(
        "python",
        ROOT / "examples" / "lightning_cli.py",
        *f"fit --trainer.devices 2 {options} --trainer.max_epochs 1".split(),
        cwd=tmp_path,
    )
    saved = OmegaConf.load(tmp_path / "config.yaml").trainer.strategy
    assert saved.class_path == "lightning_dp.LeanDDPStrategy"
    assert saved.init_args.bucket_cap_mb == 8
    assert (tmp_path / "checkpoints" / "epoch=0-step=17.ckpt").exists()


def test_readme_shows_the_minimal_example():
    """Ten lines of Python in the README, taken from a file that is run."""
    example = (ROOT / "examples" / "minimal.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    called = re.search(r"L\.Trainer\((.*?)\)", example, re.DOTALL)[1]
    assert 'strategy="lean_ddp"' in called
    assert any(
        'strategy="lean_ddp"' in block and "import lightning_dp" in block for block in blocks
    )


def test_own_project_composes_the_strategy_beside_its_own_trainer():
    with initialize_config_dir(str(OWN), version_base="1.3"):
        cfg = compose("train", overrides=["trainer.strategy.bucket_cap_mb=8"])
    assert cfg.trainer.strategy._target_ == "lightning_dp.LeanDDPStrategy"
    assert cfg.trainer.strategy.bucket_cap_mb == 8
    assert cfg.trainer.max_epochs == OmegaConf.load(OWN / "trainer" / "default.yaml").max_epochs


def test_own_project_without_a_strategy_takes_it_in_one_word(tmp_path):
    """``trainer=lean_ddp``: their trainer/default.yaml with our strategy, as in other templates."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "default.yaml").write_text("max_epochs: 7\nstrategy: auto\n")
    (tmp_path / "train.yaml").write_text(
        "defaults:\n- trainer: default\n- _self_\nhydra:\n  searchpath: [pkg://lightning_dp.conf]\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        before = compose("train").trainer
        after = compose("train", overrides=["trainer=lean_ddp", "trainer.devices=4"]).trainer
    assert before.strategy == "auto"
    assert after.strategy._target_ == "lightning_dp.LeanDDPStrategy"
    assert (after.max_epochs, after.devices) == (7, 4)
