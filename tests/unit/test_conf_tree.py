"""Every file of conf/ says what it is for, composes, and fits what it names."""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, open_dict

from lightning_dp import LeanDDPStrategy
from lightning_dp.app.arguments import check_arguments
from lightning_dp.errors import ConfigError
from lightning_dp.options import Options
from tests.support.strategy_conf import COMMAND, strategy_conf

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
FILES = sorted(path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml"))
# The Trainer alone sets these; a config cannot.
SET_BY_TRAINER = {"accelerator", "parallel_devices"}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture
def hydra_tree() -> Iterator[None]:
    before = dict(os.environ)  # some libraries write to it when imported
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        yield
    HydraConfig.instance().cfg = None
    GlobalHydra.instance().clear()
    os.environ.clear()
    os.environ.update(before)


def composed(folder: Path, *overrides: str, name: str = "train") -> DictConfig:
    """The config as the application sees it, with a folder for ``${hydra:runtime.output_dir}``."""
    cfg = compose(name, overrides=list(overrides), return_hydra_config=True)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder)
        cfg.hydra.job.id = cfg.hydra.job.num = 0
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


@pytest.mark.parametrize("file", FILES)
def test_file_says_what_it_is_for(file):
    lines = (CONF / file).read_text().splitlines()
    told = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert re.match(r"# \w", told), f"{file}: {told!r}"


def test_packages_of_the_wheel_are_the_folders():
    listed = re.search(
        r"^packages = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert listed is not None
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "lightning_dp").rglob("*.py")
    }
    assert set(re.findall(r'"(.+?)"', listed[1])) == found | {"lightning_dp.conf"}


@pytest.mark.usefixtures("hydra_tree")
class TestComposed:
    @pytest.mark.parametrize(
        "choice",
        [
            f"{group}={option}"
            for group in ("strategy", "trainer", "model", "data", "callbacks", "logger")
            for option in options(group)
        ]
        + [
            f"{group}={option}"
            for group in ("experiment", "debug", "hparams_search")
            for option in options(group)
        ],
    )
    def test_every_choice_composes_and_fits_what_it_names(self, choice, tmp_path):
        extra = ["data=bytes"] if choice == "model=bytes" else []  # model.length is data.length
        check_arguments(composed(tmp_path, choice, *extra))

    @pytest.mark.parametrize("experiment", options("experiment"))
    @pytest.mark.parametrize("trainer", ["cpu", "cpu_sim", "lean_ddp"])
    def test_parts_are_what_the_trainer_takes(self, experiment, trainer, tmp_path):
        cfg = composed(tmp_path, f"experiment={experiment}", f"trainer={trainer}")
        cfg.trainer.accelerator, cfg.trainer.devices = "cpu", cfg.trainer.devices or 1
        callbacks = [instantiate(node) for node in cfg.callbacks.values()]
        loggers = [instantiate(node) for node in cfg.logger.values()]
        built = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
        assert isinstance(built.strategy, LeanDDPStrategy)
        assert isinstance(instantiate(cfg.model), L.LightningModule)
        assert isinstance(instantiate(cfg.data), L.LightningDataModule)

    def test_evaluation_composes(self, tmp_path):
        cfg = composed(tmp_path, "ckpt_path=x", "experiment=bytes", name="eval")
        check_arguments(cfg)
        assert cfg.model._target_.endswith("BytesModule")

    def test_strategy_lists_every_option_with_its_default(self, tmp_path):
        assert (CONF / "strategy" / "lean_ddp.yaml").read_text() == strategy_conf(), COMMAND
        node = instantiate(composed(tmp_path).strategy, _target_="builtins.dict", _convert_="all")
        assert Options(**node) == Options()
        assert node.keys() == inspect.signature(LeanDDPStrategy).parameters.keys() - SET_BY_TRAINER

    def test_old_names_of_options_are_accepted(self, tmp_path):
        with pytest.warns(FutureWarning, match="incomplete_window='carry'"):
            strategy = instantiate(composed(tmp_path, "strategy.tail=carry").strategy)
        assert strategy.options.incomplete_window == "carry"

    def test_few_meetings_by_name(self, tmp_path):
        for override, every in (("strategy/outer=averaging", 20), ("experiment=bytes_diloco", 20)):
            strategy = instantiate(composed(tmp_path, override).strategy, _convert_="all")
            assert strategy.options.outer["every"] == every

    def test_ddp_is_there_to_compare_with(self, tmp_path):
        cfg = composed(tmp_path, "strategy=ddp")
        assert type(instantiate(cfg.trainer, logger=False).strategy) is DDPStrategy

    def test_search_varies_what_the_model_has(self, tmp_path):
        cfg = composed(tmp_path)
        for option in options("hparams_search"):
            search = yaml.safe_load((CONF / "hparams_search" / f"{option}.yaml").read_text())
            for name in search["hydra"]["sweeper"]["params"]:
                group, key = name.split(".")
                assert key in cfg[group], name


@pytest.mark.usefixtures("hydra_tree")
class TestMistakes:
    """Control: :func:`check_arguments` finds what is wrong, by its place in the config."""

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("+trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
            ("+model.widht=3", "Did you mean model.width?"),
            ("+strategy.bucket_cap=3", "strategy.bucket_cap"),
            ("data.batch_size=many", "data.batch_size must be int, not 'many'"),
            ("data.batch_size=1.5", "data.batch_size must be int"),
            ("data.batch_size=0", "at least 1"),
            ("data.num_workers=true", "data.num_workers must be int"),
            ("trainer.max_epochs=some", "trainer.max_epochs must be int or null"),
            ("model.lr=fast", "model.lr must be float"),
            ("model._target_=no.such.Module", "no.such.Module"),
            ("callbacks.model_checkpoint.mode=3", "callbacks.model_checkpoint.mode must be str"),
        ],
    )
    def test_is_found_and_named(self, override, told, tmp_path):
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_arguments(composed(tmp_path, override))

    @pytest.mark.parametrize(
        "override",
        [
            "model.lr=1",
            "trainer.max_epochs=null",
            "trainer.devices=[0]",
            "trainer.max_time=00:01:00:00",
        ],
    )
    def test_is_not_seen_where_there_is_none(self, override, tmp_path):
        check_arguments(composed(tmp_path, override))
