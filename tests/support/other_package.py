"""Tests of ``lightning`` run with ``pytorch_lightning``: ``pytest -p tests.support.other_package FILE...``

While pytest runs, ``lightning`` counts as not installed, and a test's ``import lightning.pytorch`` gives
it ``pytorch_lightning``. The package itself must find that by its own means. Programs that a test starts
are not in this session.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

import lightning_dp
from lightning_dp.internals import binding

NAMES = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    "lightning": "pytorch_lightning",
}


class _OtherNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "lightning":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        name = next(name for name in NAMES if f"{spec.name}.".startswith(f"{name}."))
        module = importlib.import_module(NAMES[name] + spec.name[len(name) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has put in ours


def pytest_report_header() -> str:
    return (
        f"bound to {binding.bound().package}: {lightning_dp.LeanDDPStrategy.__mro__[1].__module__}"
    )


def _install() -> None:
    """At import, which comes before tests are collected."""
    assert not any(name.partition(".")[0] == "lightning" for name in sys.modules)
    sys.meta_path.insert(0, _OtherNames())  # before the finders of lightning_dp
    assert binding.bound().package == "pytorch_lightning"


_install()
