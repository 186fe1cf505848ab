"""LightningCLI reads the strategy's options from its signature: command line, config files, help."""

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_dp import LeanDDPStrategy
from lightning_dp.demos.digits import DigitsDataModule, DigitsModule
from lightning_dp.options import Options, meanings

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),
    pytest.mark.filterwarnings("ignore:(?s).*deprecated in v4"),  # Lightning calls jsonargparse so
]
CLASS = "--trainer.strategy=lightning_dp.LeanDDPStrategy"


class Mine(LeanDDPStrategy):
    """A user's own, with an option of its own."""

    def __init__(self, mine: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.mine = mine


def strategy_of(*args):
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False}
    return LightningCLI(
        DigitsModule, DigitsDataModule, run=False, args=list(args), trainer_defaults=trainer
    ).trainer.strategy


def printed(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        strategy_of(*args)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_by_name():
    assert strategy_of("--trainer.strategy=lean_ddp").options == Options()


def test_options_on_the_command_line():
    strategy = strategy_of(
        CLASS,
        "--trainer.strategy.bucket_cap_mb=8",
        "--trainer.strategy.deferred+=net.*",
        "--trainer.strategy.stall_report_s=0",
        '--trainer.strategy.batch={"global": 64, "micro": 64}',
        "--trainer.strategy.cluster_environment=LightningEnvironment",
    )
    assert type(strategy) is LeanDDPStrategy
    assert strategy.options.bucket_cap_mb == 8
    assert strategy.options.deferred == ("net.*",)
    assert strategy.options.stall_report_s == 0
    assert strategy.options.batch == {"global": 64, "micro": 64}


def test_options_in_a_config_file(tmp_path):
    node = {"class_path": "lightning_dp.LeanDDPStrategy", "init_args": {"tail": "carry"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": node}}))
    with pytest.warns(FutureWarning, match="tail is now incomplete_window"):
        strategy = strategy_of(f"--config={tmp_path / 'config.yaml'}")
    assert strategy.options.incomplete_window == "carry"


def test_a_printed_config_is_read_again(capsys, tmp_path):
    text = printed(capsys, CLASS, "--trainer.strategy.bucket_cap_mb=8", "--print_config")
    node = yaml.safe_load(text)["trainer"]["strategy"]
    assert node["class_path"] == "lightning_dp.LeanDDPStrategy"
    assert node["init_args"].keys() == meanings().keys()
    assert Options(**node["init_args"]) == Options(bucket_cap_mb=8)
    (tmp_path / "config.yaml").write_text(text)
    assert strategy_of(f"--config={tmp_path / 'config.yaml'}").options == Options(bucket_cap_mb=8)


def test_help_shows_every_option_with_its_meaning(capsys):
    text = " ".join(printed(capsys, "--trainer.strategy.help=lightning_dp.LeanDDPStrategy").split())
    for name, meaning in meanings().items():
        assert f"--trainer.strategy.{name}" in text
        assert meaning[:30] in text, name


def test_a_subclass_keeps_the_options():
    strategy = strategy_of(
        f"--trainer.strategy={__name__}.Mine",
        "--trainer.strategy.mine=3",
        "--trainer.strategy.buffers=step",
    )
    assert (strategy.mine, strategy.options.buffers) == (3, "step")


@pytest.mark.parametrize(
    ("wrong", "said"), [("bucket_cap=8", "'bucket_cap' is not accepted"), ("buffers=often", "lazy")]
)
def test_control_mistakes_are_refused(capsys, wrong, said):
    with pytest.raises(SystemExit) as ended:
        strategy_of(CLASS, f"--trainer.strategy.{wrong}")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
