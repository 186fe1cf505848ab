"""What users import. A name that comes or goes changes this file and the changelog."""

import importlib
import importlib.util
import inspect
import os
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_dp
from lightning_dp import errors

NAMES = {
    "LRScaling",
    "LeanDDPMonitor",
    "LeanDDPStrategy",
    "NoiseScale",
    "StepStats",
    "StepTimeline",
    "__version__",
}


def test_public_names_are_these():
    assert set(lightning_dp.__all__) == NAMES
    assert all(hasattr(lightning_dp, name) for name in NAMES)


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_public_names_are_documented(name):
    assert inspect.getdoc(getattr(lightning_dp, name))


def test_without_ray_its_module_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    monkeypatch.delitem(sys.modules, "lightning_dp.ray", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'lightning_dp\[ray\]'"):
        importlib.import_module("lightning_dp.ray")


def test_every_error_is_of_our_tree_and_documented():
    ours = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert len(ours) > 5
    for error in ours:
        assert issubclass(error, errors.LeanDDPError)
        assert error.__doc__
        assert error.__name__ in errors.__doc__ or error is errors.LeanDDPError


def test_names_for_the_trainer_are_registered_once_however_often_imported():
    expected = {
        f"lean_ddp{start}{unused}"
        for start in ("", "_spawn", "_fork", "_notebook")
        for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    } | {f"lean_zero1{start}" for start in ("", "_spawn", "_fork", "_notebook")}
    importlib.reload(lightning_dp)
    registered = StrategyRegistry.available_strategies()
    assert {name for name in registered if name.startswith("lean_")} == expected
    assert len(registered) == len(set(registered))


@pytest.mark.parametrize("name", ["faults.ctrl_c", "engine.wires.shm_peers"])
def test_it_is_imported_where_no_process_forks(name, monkeypatch):
    monkeypatch.delattr(os, "register_at_fork")
    there = importlib.import_module(f"lightning_dp.{name}").__spec__
    again = importlib.util.spec_from_file_location(f"{name}_again", there.origin)
    again.loader.exec_module(importlib.util.module_from_spec(again))
