"""Names, arguments and their errors; no process group."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import hydra_zen
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from omegaconf import OmegaConf

import lightning_dp
from lightning_dp import LeanDDPStrategy
from lightning_dp.errors import ConfigError
from lightning_dp.options import RENAMED, Options, check, meanings
from lightning_dp.step.batch_plan import batch_plan
from lightning_dp.step.bucket_size import layout_options

ROOT = Path(__file__).parents[2]


def test_every_name_is_registered():
    for start, method in (
        ("", "popen"),
        ("_spawn", "spawn"),
        ("_fork", "fork"),
        ("_notebook", "fork"),
    ):
        for tail in ("", "_find_unused_parameters_true", "_find_unused_parameters_false"):
            entry = StrategyRegistry[f"lean_ddp{start}{tail}"]
            assert entry["strategy"] is LeanDDPStrategy
            assert entry["init_params"]["start_method"] == method


def test_registration_is_idempotent():
    before = dict(StrategyRegistry)
    importlib.reload(lightning_dp)
    assert set(StrategyRegistry) == set(before)


def test_the_trainer_takes_the_name():
    trainer = Trainer(strategy="lean_ddp", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, LeanDDPStrategy)
    assert isinstance(trainer.strategy, DDPStrategy)


@pytest.mark.parametrize("name", ["lean_ddp_spawn", "lean_zero1_spawn"])
def test_a_spawned_rank_gets_a_copy(name):
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    copy = pickle.loads(pickle.dumps(trainer.strategy.launcher))
    assert type(copy) is type(trainer.strategy.launcher)


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(TypeError, match=r"'bucket_cap'\. Did you mean 'bucket_cap_mb'\?$"):
        LeanDDPStrategy(bucket_cap=25)


def test_an_argument_that_is_near_none_is_shown_a_few():
    with pytest.raises(TypeError, match=r"'qqq'\. It takes .* and \d+ more: see help") as caught:
        LeanDDPStrategy(qqq=25)
    assert len(str(caught.value)) < 250


def test_a_subclass_keeps_its_own_arguments():
    class Mine(LeanDDPStrategy):
        def __init__(self, *, mine=0, **kwargs):
            super().__init__(**kwargs)
            self.mine = mine

    assert Mine(mine=3, bucket_cap_mb=1).mine == 3
    with pytest.raises(TypeError, match=r"'bucket_capmb'\. Did you mean 'bucket_cap_mb'"):
        Mine(bucket_capmb=1)
    with pytest.raises(TypeError, match=r"'mien'\. Did you mean 'mine'"):
        Mine(mien=1)


@pytest.mark.parametrize(
    ("wrong", "wanted"),
    [
        ({"bucket_cap_mb": 0}, "a number above 0 or 'auto'"),
        ({"bucket_cap_mb": "big"}, "a number above 0 or 'auto'"),
        ({"bucket_cap_mb": True}, "a number above 0 or 'auto'"),
        ({"wire": "fp8"}, "'auto' or 'fp32' or 'bf16' or 'fp16' or 'int8' or a mapping of dtype"),
        ({"buffers": "always"}, "'lazy' or 'step' or 'none'"),
        ({"check_replicas_every_n_steps": -1}, "a whole number above 0 or 0"),
        ({"check_replicas_every_n_steps": False}, "a whole number above 0 or 0"),
        ({"check_replicas_every_n_steps": 2.5}, "a whole number above 0 or 0"),
        ({"check_gradients": True}, "'off' or 'warn' or 'raise'"),
        ({"incomplete_window": "skip"}, "'step' or 'carry' or 'drop'"),
        ({"shared_memory": "yes"}, "true or false"),
        ({"deferred": "net.*"}, "a list of names"),
        ({"deferred": [3]}, "a list of names"),
        ({"start_method": "thread"}, "'popen' or"),
        ({"timeout": -5}, "a number above 0 or None"),
        ({"timeout": timedelta(0)}, "a timedelta above 0"),
        ({"timeout": "soon"}, "a number above 0"),
        ({"rendezvous_timeout_s": float("nan")}, "a number above 0"),
        ({"error_grace_s": 0}, "a number above 0"),
        ({"stall_report_s": -1}, "a number above 0 or 0"),
        ({"process_group_backend": 3}, "a name or None"),
        ({"static_graph": "true"}, "true or false or None"),
        ({"batch": 512}, "a mapping of global, micro, accumulate or None"),
    ],
)
def test_an_impossible_value_names_its_argument_and_what_is_possible(wrong, wanted):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError) as caught:
        LeanDDPStrategy(**wrong)
    says = f"{name}={value!r} is not possible; it must be "
    assert str(caught.value).startswith(says)
    assert wanted in str(caught.value)[len(says) :]


def test_a_signal_that_cannot_be_handled_is_named():
    for name in ("SIGWHAT", "SIGKILL"):
        with pytest.raises(ConfigError, match=f"preempt_signals: '{name}'"):
            LeanDDPStrategy(preempt_signals=[name])


@pytest.mark.parametrize(
    "right",
    [
        {"bucket_cap_mb": 8},
        {"bucket_cap_mb": 0.5},
        {"check_replicas_every_n_steps": 0},
        {"stall_report_s": 0.0},
        {"timeout": timedelta(seconds=3)},
        {"timeout": None},
        {"ddp_comm_state": True},
        {"batch": {"global": 64, "micro": 16}},
    ],
)
def test_control_possible_values_pass(right):
    ((name, value),) = right.items()
    assert getattr(LeanDDPStrategy(**right).options, name) == value


def test_lists_of_yaml_become_tuples():
    strategy = LeanDDPStrategy(deferred=OmegaConf.create(["net.*"]), preempt_signals=["SIGUSR2"])
    assert strategy.options.deferred == ("net.*",)
    assert strategy.options.preempt_signals == ("SIGUSR2",)


# Names that were others


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [("tail", "incomplete_window", "carry"), ("eval_tail", "eval_padding", "pad")],
)
def test_an_old_name_is_accepted_with_one_warning(old, new, value):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = LeanDDPStrategy(**{old: value})
    assert getattr(strategy.options, new) == value
    (warning,) = [str(each.message) for each in caught if "lean_ddp" in str(each.message)]
    assert f"{old} is now {new}: write {new}={value!r}" in warning
    assert {each.filename for each in caught} == {__file__}, "not the line to change"


def test_an_old_name_beside_the_new_one():
    with pytest.raises(ConfigError, match="eval_tail='exact' contradicts eval_padding='pad'"):
        LeanDDPStrategy(eval_tail="exact", eval_padding="pad")


def test_an_impossible_value_under_an_old_name_is_refused_under_the_new():
    with (
        pytest.warns(FutureWarning, match="tail is now"),
        pytest.raises(ConfigError, match="incomplete_window='skip' is not possible"),
    ):
        LeanDDPStrategy(tail="skip")


def test_the_new_name_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        LeanDDPStrategy(incomplete_window="carry", eval_padding="pad")


def test_every_old_name_says_so_in_help():
    for old, new in RENAMED.items():
        assert meanings()[old] == f"Old name of ``{new}``; warns."


def test_what_does_nothing_says_so(caplog):
    with caplog.at_level("INFO"):
        LeanDDPStrategy(static_graph=True)
    assert "static_graph does nothing: nothing is assumed about the graph." in caplog.text


# The signature


def test_all_arguments_are_keyword_only_and_documented():
    parameters = inspect.signature(LeanDDPStrategy).parameters
    assert {option.name for option in fields(Options)} == set(parameters) == set(meanings())
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert parameter.default is not inspect.Parameter.empty, name
        assert not isinstance(parameter.annotation, str), name
        assert f"\n    {name}: " in inspect.getdoc(LeanDDPStrategy.__init__), name


def test_every_default_is_possible():
    Options()
    for name, parameter in inspect.signature(LeanDDPStrategy).parameters.items():
        check(name, parameter.default, parameter.annotation)


def test_lightning_is_given_what_it_takes():
    taken = set(inspect.signature(DDPStrategy.__init__).parameters)
    assert set(Options().of_ddp()) <= taken


def test_type_checkers_see_the_signature(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from lightning_dp import LeanDDPStrategy\n"
        "LeanDDPStrategy(bucket_cap_mb=8, deferred=['x'], batch={'global': 64, 'micro': 16})\n"
        "LeanDDPStrategy(bucket_cap=8)\n"
        "LeanDDPStrategy(buffers='often')\n"
        "LeanDDPStrategy('auto')\n"
    )
    checker = [sys.executable, "-m", "mypy", "--strict", str(program)]
    out = subprocess.run(checker, cwd=ROOT, capture_output=True, text=True).stdout
    assert re.findall(r"program.py:(\d+): error: .*\[(.*)\]", out) == [
        ("3", "call-arg"),
        ("4", "arg-type"),
        ("5", "call-arg"),
    ], out


def test_hydra_zen_builds_it():
    config = hydra_zen.builds(LeanDDPStrategy, populate_full_signature=True)
    strategy = hydra_zen.instantiate(config(bucket_cap_mb=8, deferred=["net.*"]))
    assert strategy.options == Options(bucket_cap_mb=8, deferred=["net.*"])
    with pytest.raises(TypeError, match="bucket_cap"):
        config(bucket_cap=8)


# A batch of all ranks


@pytest.mark.parametrize(
    ("batch", "world", "want"),
    [
        ({"global": 512, "micro": 16, "accumulate": "auto"}, 4, (8, 16)),
        ({"global": 32, "micro": 16}, 2, (1, 16)),
        ({"global": 96, "micro": 16, "accumulate": 3}, 2, (3, 16)),
    ],
)
def test_batch_arithmetic(batch, world, want):
    assert batch_plan(batch, world, 1) == want


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"global": 500, "micro": 16}, "global=512 with accumulate=8"),
        ({"global": 512, "micro": 16, "accumulate": 3}, "batch.global=512"),
    ],
)
def test_contradictory_batches_are_one_clear_error(batch, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        batch_plan(batch, 4, 1)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"globl": 512, "micro": 16}, "batch has no 'globl'; it takes 'global', 'micro'"),
        ({"global": 512, "micro": 16, "steps": 2}, "batch has no 'steps'"),
        ({"global": 512}, "batch needs 'micro'"),
        ({"global": "big", "micro": 16}, "batch.global='big' is not possible; it must be a whole"),
        ({"global": 512, "micro": 0}, "batch.micro=0"),
        ({"global": 512, "micro": 16, "accumulate": "all"}, "accumulate='all' .* or 'auto'"),
    ],
)
def test_an_impossible_batch_is_refused_at_once(batch, says):
    with pytest.raises(ConfigError, match=says):
        Options(batch=batch)


def test_a_batch_that_contradicts_the_trainer():
    with pytest.raises(ConfigError, match="accumulate_grad_batches=5"):
        batch_plan({"global": 512, "micro": 16}, 4, 5)


def test_deterministic_runs_do_not_choose_bucket_sizes_by_the_clock():
    cpu = torch.device("cpu")
    assert layout_options(Options(), cpu).tune
    assert not layout_options(Options(), cpu, shared=True).tune
    assert not layout_options(Options(bucket_cap_mb=2), cpu).tune
    assert not layout_options(Options(), torch.device("cuda")).tune
    torch.use_deterministic_algorithms(True)
    try:
        assert not layout_options(Options(), cpu).tune
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "other", [{"ddp_comm_hook": lambda *_: None}, {"outer": {"every": 2}}], ids=["hook", "outer"]
)
def test_z21_zero_excludes_what_needs_whole_buckets_or_other_parameters(other):
    with pytest.raises(ConfigError, match=r"zero=1 and .* exclude each other: .* Drop one"):
        LeanDDPStrategy(zero=1, **other)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"master": True}, "zero has no 'master'; it takes"),
        (
            {"split": 3},
            "zero.split=3 is not possible; it must be 'auto' or 'off' or a list of names",
        ),
        (2, "zero=2 is not possible; it must be 0 or 1 or a mapping of"),
        (True, "zero=True is not possible"),
    ],
    ids=str,
)
def test_zero_is_a_number_or_a_mapping_of_known_keys(value, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        LeanDDPStrategy(zero=value)
