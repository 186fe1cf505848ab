"""Names, arguments and their errors; no process group."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_dp
from lightning_dp import LeanDDPStrategy
from lightning_dp.errors import ConfigError, LeanDDPError
from lightning_dp.options import EngineOptions
from lightning_dp.step.batch_plan import batch_plan


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
    with pytest.raises(TypeError):
        Mine(bucket_capmb=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": "big"},
        {"reduce_dtype": "fp8"},
        {"buffers": "always"},
        {"buffer_reduce": "max"},
        {"check_replicas_every_n_steps": -1},
        {"on_mismatch": "ignore"},
        {"check_gradients": True},
        {"accum_sync": "never"},
        {"manual_sync": "auto"},
        {"tail": "skip"},
        {"mid_window": "lose"},
        {"shared_memory": "yes"},
        {"batch": {"globl": 512, "micro": 16}},
        {"timeout": -5},
        {"timeout": "soon"},
    ],
)
def test_an_impossible_value_names_its_argument(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        LeanDDPStrategy(**wrong)
    assert isinstance(caught.value, (ValueError, LeanDDPError))


def test_all_arguments_are_keyword_only_and_documented():
    signature = inspect.signature(LeanDDPStrategy.__init__)
    doc = inspect.getdoc(LeanDDPStrategy)
    for name, parameter in signature.parameters.items():
        if name == "self":
            continue
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert parameter.default is not inspect.Parameter.empty, name
        assert parameter.annotation is not inspect.Parameter.empty, name
        assert f"\n    {name}: " in doc, f"{name} is not documented"


@pytest.mark.parametrize(
    ("batch", "world", "want"),
    [
        ({"global": 512, "micro": 16, "accumulate": "auto"}, 4, (8, 16)),
        ({"global": 32, "micro": 16}, 2, (1, 16)),
        ({"global": 96, "micro": 16, "accumulate": 3}, 2, (3, 16)),
        (None, 2, (1, None)),
    ],
)
def test_batch_arithmetic(batch, world, want):
    assert batch_plan(batch, world, 1) == want


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"global": 500, "micro": 16}, "global=512 with accumulate=8"),
        ({"global": 512, "micro": 16, "accumulate": 3}, "batch.global=512"),
        ({"global": "big", "micro": 16}, "batch.global='big'"),
        ({"global": 512, "micro": 0}, "batch.micro=0"),
        ({"global": 512, "micro": 16, "steps": 2}, "steps"),
    ],
)
def test_contradictory_batches_are_one_clear_error(batch, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        batch_plan(batch, 4, 1)


def test_a_batch_that_contradicts_the_trainer():
    with pytest.raises(ConfigError, match="accumulate_grad_batches=5"):
        batch_plan({"global": 512, "micro": 16}, 4, 5)


def test_deterministic_runs_do_not_choose_bucket_sizes_by_the_clock():
    cpu = torch.device("cpu")
    assert EngineOptions().layout(cpu).tune
    assert not EngineOptions().layout(cpu, shared=True).tune
    assert not EngineOptions(bucket_cap_mb=2).layout(cpu).tune
    assert not EngineOptions().layout(torch.device("cuda")).tune
    torch.use_deterministic_algorithms(True)
    try:
        assert not EngineOptions().layout(cpu).tune
    finally:
        torch.use_deterministic_algorithms(False)
