"""Which of Lightning's packages a process is bound to. What is imported when: launch/test_namespaces."""

import ast
import re
import sys
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_dp.errors import ConfigError
from lightning_dp.internals import binding

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh(monkeypatch):
    """An unbound process that has imported neither; sets what is installed."""
    monkeypatch.setattr(binding, "_bound", None)
    monkeypatch.delenv(binding.VARIABLE, raising=False)
    for name in binding.TRAINERS.values():
        monkeypatch.delitem(sys.modules, name, raising=False)

    def installed(*packages, version="2.6.6"):
        monkeypatch.setattr(binding, "installed", lambda: list(packages))
        monkeypatch.setattr(binding, "version_of", lambda _: version)

    installed("lightning", "pytorch_lightning")
    return SimpleNamespace(installed=installed, setenv=monkeypatch.setenv, patch=monkeypatch)


@pytest.mark.parametrize(
    ("there", "imported", "variable", "package"),
    [
        (["lightning"], [], None, "lightning"),
        (["pytorch_lightning"], [], None, "pytorch_lightning"),
        (["lightning", "pytorch_lightning"], [], None, "lightning"),
        (["lightning", "pytorch_lightning"], ["pytorch_lightning"], None, "pytorch_lightning"),
        (["lightning", "pytorch_lightning"], ["lightning.pytorch"], None, "lightning"),
        (
            ["lightning", "pytorch_lightning"],
            ["lightning.pytorch"],
            "pytorch_lightning",
            "pytorch_lightning",
        ),
    ],
)
def test_what_is_chosen(fresh, there, imported, variable, package):
    fresh.installed(*there)
    for name in imported:
        fresh.patch.setitem(sys.modules, name, SimpleNamespace())
    if variable:
        fresh.setenv(binding.VARIABLE, variable)
    assert binding.bound().package == package
    assert binding.bound() is binding.bound()


def test_a_second_package_is_told_who_was_first(fresh):
    binding.bind("pytorch_lightning", "the first Trainer")
    binding.bind("pytorch_lightning", "another")
    with pytest.raises(
        ConfigError,
        match=r"bound to pytorch_lightning, by the first Trainer \(.*test_binding.py:\d+",
    ):
        binding.bind("lightning", "the second")


def test_the_environment_has_the_last_word(fresh):
    fresh.setenv(binding.VARIABLE, "lightning")
    with pytest.raises(ConfigError, match=f"by {binding.VARIABLE}=lightning"):
        binding.bind("pytorch_lightning", "a Trainer")


@pytest.mark.parametrize("there", [[], ["lightning"]])
def test_what_is_not_there_is_an_error(fresh, there):
    fresh.installed(*there)
    fresh.setenv(binding.VARIABLE, "pytorch_lightning")
    with pytest.raises(ConfigError, match=f"{there[0] if there else 'neither'} of .*pip install"):
        binding.bound()


@pytest.mark.parametrize("version", ["2.5.6", "2.6.2", "2.6.3", "2.7.0"])
@pytest.mark.parametrize("package", binding.TRAINERS)
def test_other_releases_are_refused_before_they_are_imported(fresh, package, version):
    fresh.installed(package, version=version)
    with pytest.raises(ConfigError, match=f"{version} is not >=2.6.*pip install"):
        binding.bound()
    assert binding._bound is None


@pytest.mark.parametrize("version", ["2.6.0", "2.6.6", "2.6.7.dev1", None])
def test_control_these_pass(fresh, version):
    fresh.installed("lightning", version=version)
    assert binding.bound().package == "lightning"


def test_installed_is_what_can_be_imported(monkeypatch, tmp_path):
    assert binding.installed() == [name for name in binding.TRAINERS if util.find_spec(name)]
    assert binding.version_of("lightning") == metadata.version("lightning")
    assert binding.version_of("nobody_has_this") is None
    for name in list(sys.modules):
        if name.partition(".")[0] in binding.TRAINERS:
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "lightning").mkdir()  # a folder of logs beside the script
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[-1:])
    assert binding.installed() == []


def test_names_are_translated(fresh):
    names = ["lightning.Trainer", "lightning.pytorch.callbacks.Timer", "lightning.fabric.Fabric"]
    others = [
        "pytorch_lightning.Trainer",
        "pytorch_lightning.callbacks.Timer",
        "lightning_fabric.Fabric",
    ]
    mine = ["mine.Trainer", "lightning_dp.LeanDDPStrategy", "pytorch_lightning_more.X"]
    binding.bind("pytorch_lightning", "this test")
    assert [binding.translated(name) for name in names + mine] == others + mine
    fresh.patch.setattr(binding, "_bound", binding.Binding("lightning", "this test"))
    assert [binding.translated(name) for name in names[1:]] == names[1:]
    assert [binding.translated(name) for name in others[1:]] == names[1:]
    assert binding.translated(names[0]) == "lightning.pytorch.Trainer"


def test_a_class_tells_its_package():
    from lightning_dp.internals.lightning import pl

    class Mine(pl.LightningModule):
        pass

    assert binding.package_of(Mine) == binding.bound().package
    assert binding.package_of(dict) is None


def test_both_branches_import_the_same_names():
    tree = ast.parse((ROOT / "lightning_dp/internals/lightning.py").read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))

    def imports(body):
        found = {}
        for node in body:
            module = getattr(node, "module", None)
            for alias in node.names:
                found[alias.asname or alias.name] = (
                    f"{module}.{alias.name}" if module else alias.name
                )
        return found

    ours, others = imports(branch.body), imports(branch.orelse)
    assert len(ours) > 10
    swapped = {
        name: path.replace("lightning.pytorch", "pytorch_lightning") for name, path in ours.items()
    }
    assert {
        n: p.replace("lightning.fabric", "lightning_fabric") for n, p in swapped.items()
    } == others
    listed = next(n for n in tree.body if isinstance(n, ast.Assign)).value
    assert set(ast.literal_eval(listed)) == set(ours)


def test_the_versions_are_those_of_the_packaging():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"((?:pytorch-)?lightning)(>=[^"]*)"', text) == [
        ("pytorch-lightning", binding.VERSIONS),
        ("lightning", binding.VERSIONS),
    ]
