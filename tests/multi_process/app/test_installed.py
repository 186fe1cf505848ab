"""The wheel, installed into a fresh environment away from the checkout."""

import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.multi_process.app.commands import ROOT, succeed

pytestmark = pytest.mark.multi_process

PARTS = ("lightning_dp", "conf", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "local")
            shutil.copytree(ROOT / part, source / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, source)
    succeed("python", "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def away(wheel, tmp_path_factory) -> Path:
    """The folder of a fresh environment that has the wheel.

    Its dependencies are those of this environment, through a path file: one that is named so is read
    as a list of folders, so that the editable install of this checkout is not found.
    """
    folder = tmp_path_factory.mktemp("away")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = succeed(
        python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder
    )
    (Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = ("--no-deps", "--no-index", "--ignore-installed", "--quiet")
    succeed(sys.executable, "-m", "pip", "--python", python, "install", *install, wheel, cwd=folder)
    return folder


def bin_first(away: Path) -> str:
    return f"{away / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"


def test_wheel_holds_the_package_and_the_config_tree_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_dp"}
    configs = {
        f"lightning_dp/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")
    }
    assert {name for name in configs if "/local/" not in name} <= names
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "lightning_dp").rglob("*.py")}
    assert modules <= names
    assert "lightning_dp/py.typed" in names


def test_the_command_trains_away_from_the_checkout(away, tmp_path):
    where = succeed(
        away / "env" / "bin" / "python",
        "-c",
        "import lightning_dp; print(lightning_dp.__file__)",
        cwd=tmp_path,
    )
    assert Path(where.strip()).is_relative_to(away), where
    alone = {"PATH": bin_first(away), "PYTHONPATH": ""}
    output = succeed("lean-ddp", "train", "trainer.max_epochs=1", cwd=tmp_path, **alone)
    assert re.search(r"ranks +│ 2 ", output), output
    (run,) = (tmp_path / "outputs" / "train").iterdir()
    assert (run / "curves.png").is_file()
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_another_project_composes_our_strategy(away, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "own_hydra_project", project)
    output = succeed(
        "python", "train.py", "trainer.strategy.bucket_cap_mb=8", cwd=project, PATH=bin_first(away)
    )
    assert "LeanDDPStrategy on 2 ranks" in output
    (config,) = project.rglob(".hydra/config.yaml")
    assert "bucket_cap_mb: 8" in config.read_text()
