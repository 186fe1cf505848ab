"""``lightning.pytorch`` and ``pytorch_lightning``, in any order of imports (programs/import_orders.py)."""

import importlib
import json
import sys
from itertools import product

import pytest

import lightning_dp
from lightning_dp.internals import binding
from lightning_dp.registration.after_import import _AfterImport
from tests.multi_process.app.commands import ROOT, succeed

pytestmark = pytest.mark.multi_process

PROGRAM = ROOT / "tests" / "programs" / "import_orders.py"
FIRST, HOW = ("lightning_dp", "library"), ("name", "instance", "class_path")


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    """What came of each case."""
    folder = tmp_path_factory.mktemp("orders")
    # Without support/sooner: what its forks need it imports, once.
    lines = succeed(sys.executable, PROGRAM, folder, cwd=folder, timeout_s=250.0, PYTHONPATH="")
    return dict(json.loads(line) for line in lines.splitlines() if line.startswith("["))


@pytest.mark.parametrize(
    ("installed", "package"),
    [*((name, name) for name in binding.TRAINERS), *(("both", name) for name in binding.TRAINERS)],
)
def test_every_order_of_imports_trains(came, installed, package):
    results = {
        (first, how): came[f"case {installed} {first} {package} {how}"]
        for first, how in product(FIRST, HOW)
    }
    if (installed, package) == ("both", "pytorch_lightning"):
        # Nothing tells what will be imported after the class.
        told = results.pop(("lightning_dp", "instance"))
        assert "bound to lightning.pytorch, by an import of a class of lightning_dp" in told
        assert "this Trainer is pytorch_lightning's" in told
        remedy = f"{binding.VARIABLE}=pytorch_lightning"
        assert f"set {remedy} in the environment" in told
        assert (
            came["case both lightning_dp pytorch_lightning instance pytorch_lightning"] == "trains"
        )
    assert set(results.values()) == {"trains"}, results


@pytest.mark.parametrize("package", binding.TRAINERS)
def test_a_second_package_in_one_process_is_told_who_was_first(came, package):
    other = next(name for name in binding.TRAINERS if name != package)
    results = came[f"second_trainer {package}"]
    assert len(results) == 2
    for told in results:
        assert told.startswith("ConfigError: [lean_ddp] this process is bound to")
        assert f"bound to {binding.TRAINERS[package]}, by a Trainer that asked for" in told
        assert "(import_orders.py:" in told
        assert f"Fix: set {binding.VARIABLE}={other}" in told


def test_fabric_is_told_what_to_use(came):
    assert came["fabric"] == 4 * [f"ConfigError: {binding.FABRIC}"]


def test_callbacks_and_demos_follow(came):
    assert came["callbacks_and_demos pytorch_lightning"] == "follow"


def test_a_reload_changes_nothing():
    importlib.reload(lightning_dp)
    importlib.reload(lightning_dp)
    waiting = [finder.name for finder in sys.meta_path if isinstance(finder, _AfterImport)]
    assert len(waiting) == len(set(waiting))
