"""A wrong command line ends at once, in a few lines that say what to change."""

import runpy

import pytest

from lightning_dp.app import cli
from tests.multi_process.app.commands import forked


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("experiment=digit", "Did you mean experiment=digits?"),
        ("debug=timelin", "Did you mean debug=timeline?"),
        ("model=3", "model=3: there is no such file"),
        ("=3", "there is no name before"),
        ("stratgy=ddp", "Did you mean strategy?"),
        ("trainr.max_epochs=3", "Did you mean trainer.max_epochs?"),
        ("trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
        ("~trainer.max_epoch", "Did you mean trainer.max_epochs?"),
        ("max_epochs=3", "Did you mean trainer.max_epochs?"),
        ("hydra.run.dr=x", "Did you mean hydra.run.dir?"),
        ("--config-name=trian", "Did you mean --config-name=train?"),
        ("model.wdth.x=3", "Did you mean model.width?"),
        ("model.width.x=3", "Did you mean model.width?"),
        ("no.such.thing=3", "there is no no.such.thing. --cfg job prints what there is."),
        ("+trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
        ("strategy.bucket_cap=3", "Did you mean strategy.bucket_cap_mb?"),
        ("strategy.bucket_cap_mb=-1", "bucket_cap_mb=-1"),
        ("trainer.devices=0", "devices=0"),
        ("trainer.accelerator=abacus", "abacus"),
        ("data.batch_size=many", "data.batch_size must be int, not 'many'"),
        # Below a reference (strategy: ${strategy}) nothing can be set: where it points, it can.
        ("trainer.strategy.bucket_cap_mb=3", "Did you mean strategy.bucket_cap_mb?"),
        ("data.num_workers=-1", "data.num_workers must be at least 0, not -1"),
        ("seed=abc", "seed must be null or a whole number"),
        ("seed=-1", "seed must be null or a whole number"),
        ("data.batch_size=0", "data.batch_size must be at least 1, not 0"),
        ("model._target_=no.such.Module", "'no.such.Module' cannot be imported"),
        ("model.lr=", "model.lr must be float, not ''"),
        ("trainer.max_epochs=[", "no viable alternative at input"),
    ],
)
def test_is_explained_without_a_traceback(override, told, tmp_path):
    code, printed = forked(tmp_path, "train", override)
    assert code in (1, 2), printed
    assert told in printed
    assert "Traceback" not in printed
    assert len(printed) < 2000


def test_two_mistakes_and_a_sweep(tmp_path):
    code, printed = forked(tmp_path, "train", "-m", "data=digit", "stratgy=ddp,lean_ddp")
    assert code == 1
    assert printed.count("Did you mean") == 1, printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        # What keys there are depends on the choices that were typed; the second mistake waits.
        (("model=bytes", "data=bytes", "model.dept=3", "model.lrr=1"), "model.depth?"),
        # A key that can be added is told so; below a reference or a misspelt name none can be.
        (
            ("trainer.enable_checkpointing=false",),
            "To add a new key: +trainer.enable_checkpointing",
        ),
    ],
)
def test_advice_fits_the_config_that_was_asked_for(overrides, told, tmp_path):
    code, printed = forked(tmp_path, "train", *overrides)
    assert code == 1
    assert told in printed


@pytest.mark.parametrize("override", ["trainer.strategy.tail=step", "trainr.max_epochs=3"])
def test_control_no_key_can_be_added_below_a_reference(override, tmp_path):
    assert "To add" not in forked(tmp_path, "train", override)[1]


def test_hydras_own_text_where_there_is_nothing_to_add(tmp_path):
    code, printed = forked(tmp_path, "train", "trainer.devices=1,2")
    assert code == 1
    assert "Ambiguous value" in printed


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("ckpt_path=nowhere.ckpt", "there is no file"),
        ("trainer.devices=2", "ckpt_path has no value; give one: ckpt_path=VALUE"),
    ],
)
def test_evaluate_without_a_checkpoint_is_explained(override, told, tmp_path):
    code, printed = forked(tmp_path, "evaluate", override)
    assert code in (1, 2), printed
    assert told in printed
    assert "Traceback" not in printed


def test_evaluate_of_a_checkpoint_without_its_run_says_what_to_give(tmp_path):
    (tmp_path / "alone.ckpt").write_bytes(b"")
    code, printed = forked(tmp_path, "evaluate", "ckpt_path=alone.ckpt")
    assert code == 1
    assert "experiment=" in printed
    assert "Traceback" not in printed


BROKEN = """
import lightning as L

class Broken(L.LightningDataModule):
    def __init__(self, **kwargs):
        super().__init__()

    def setup(self, stage):
        raise RuntimeError("a fault in the user's code")
"""


def test_control_a_fault_in_a_program_keeps_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    code, printed = forked(tmp_path, "train", "trainer.devices=1", "data._target_=mine.Broken")
    assert code == 1
    assert "Traceback" in printed
    assert "a fault in the user's code" in printed


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ([], 2, "usage: lean-ddp COMMAND"),
        (["--help"], 0, "usage: lean-ddp COMMAND"),
        (["--version"], 0, "0."),
        (["trian"], 2, "Did you mean train?"),
        (["train", "--help"], 0, "lightning_dp"),
    ],
)
def test_the_command_line_itself(argv, code, told, tmp_path):
    ended, printed = forked(tmp_path, *argv)
    assert ended == code, printed
    assert told in printed


def test_every_command_of_the_table_can_be_loaded():
    for name, (target, told) in cli.COMMANDS.items():
        module, _, function = target.partition(":")
        found = runpy.run_module(module, run_name="looked at")
        assert callable(found[function or "main"]), name
        assert told
