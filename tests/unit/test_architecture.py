"""Imports go one way, private names stay in the seams, and long files give a reason."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_dp"
ROOT = Path(__file__).parents[2] / PACKAGE

# Left may not import right. A top-level module that is not listed belongs to the strategy's layer.
LAYERS = {
    "errors": 0,
    "engine": 1,
    "data": 1,
    "internals": 2,
    "faults": 2,
    "measure": 2,
    "launch": 3,
}
STRATEGY, INIT, APP = 4, 5, 6
LAYERS |= {"__init__": INIT, "app": APP, "conf": APP}
SIBLINGS_APART = {"engine", "data"}  # same layer, and neither may know the other

# The demos are written as a user would write them.
KNOWS_NOTHING_OF_US = {"demos"}
CALLBACKS = {"monitor", "timeline"}  # of measure/: what a user adds to a Trainer
TORCH_ONLY = {"errors", "engine", "data"}
SEAMS = re.compile(r"internals/[a-z]+\.py")
TORCH_SEAMS = "internals.autograd"  # knows torch only: the engine may ask it
MAX_LINES = 250


def unit_of(path: Path) -> str:
    """``engine`` for ``engine/bucket.py``, ``strategy`` for ``strategy.py``."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def layer_of(unit: str) -> int:
    return LAYERS.get(unit, STRATEGY)


def imports_of(tree: ast.AST, inside: str) -> Iterator[tuple[str, bool]]:
    """Yield every imported name, and whether only type checkers see it."""
    for node in ast.iter_child_nodes(tree):
        only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # from . import x
                base = ".".join(inside.split(".")[: -node.level] + ([base] if base else []))
            yield from ((f"{base}.{alias.name}", False) for alias in node.names)
        else:
            for name, hidden in imports_of(node, inside):
                yield name, hidden or only_types


def violations(root: Path) -> list[str]:
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        unit = unit_of(path)
        inside = ".".join([PACKAGE, *path.with_suffix("").parts])
        for name, only_types in imports_of(ast.parse(file.read_text()), inside):
            reason = refused(path, unit, name, only_types)
            if reason:
                found.append(f"{path.as_posix()} imports {name}: {reason}")
    return found


def refused(path: Path, unit: str, name: str, only_types: bool) -> str | None:
    top, *rest = name.split(".")
    if any(re.fullmatch(r"_[a-zA-Z0-9].*", part) for part in rest) and top != PACKAGE:
        return None if SEAMS.fullmatch(path.as_posix()) else "private names live in the seams"
    if top == PACKAGE:
        if unit in KNOWS_NOTHING_OF_US and rest[0] not in KNOWS_NOTHING_OF_US:
            return "the demos know nothing of us"
        # `from lightning_dp import x` may name a module or something of __init__
        other = rest[0] if rest and (ROOT / rest[0]).exists() else None
        other = other or (rest[0] if rest and (ROOT / f"{rest[0]}.py").exists() else "__init__")
        if only_types or other == unit or name.startswith(f"{PACKAGE}.{TORCH_SEAMS}"):
            return None
        if layer_of(other) > layer_of(unit):
            return f"{unit} lies left of {other}"
        if {other, unit} == SIBLINGS_APART:
            return f"{unit} and {other} do not know each other"
        return None
    if top in ("hydra", "omegaconf") and unit != "app" and not SEAMS.fullmatch(path.as_posix()):
        return "hydra is for the application"
    if unit in TORCH_ONLY and top not in {"torch", "__future__"} | sys.stdlib_module_names:
        return f"{unit} imports torch and the standard library only"
    if unit == "measure" and path.stem not in CALLBACKS and "lightning" in top:
        return "only callbacks speak to Lightning"
    return None


def test_imports_go_one_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("errors.py", "from lightning_dp.engine.bucket import Bucket"),
        ("engine/bucket.py", "import lightning_dp.strategy"),
        ("engine/bucket.py", "from lightning_dp.data import order"),
        ("data/order.py", "from lightning_dp.engine import bucket"),
        ("engine/bucket.py", "import lightning as L"),
        ("engine/bucket.py", "def f():\n    from lightning.pytorch import Trainer"),
        ("data/order.py", "import numpy"),
        ("data/order.py", "from torch._utils import _flatten_dense_tensors"),
        ("faults/record.py", "from ..strategy import LeanDDPStrategy"),
        ("measure/stats.py", "import lightning"),
        ("strategy.py", "from lightning_dp import __version__"),
        ("strategy.py", "from lightning_dp.app.train import train"),
        ("strategy.py", "import hydra"),
        ("launch/launcher.py", "def f():\n    from hydra.core.hydra_config import HydraConfig"),
        ("engine/internals.py", "from torch._utils import x"),
        ("strategy.py", "from hydra._internal.utils import get_args_parser"),
        ("demos/digits.py", "import lightning_dp.engine"),
    ],
)
def test_control_each_wrong_import_is_found(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("engine/bucket.py", "from lightning_dp.errors import ConfigError"),
        ("internals/autograd.py", "from torch._C import _functions"),
        ("faults/watch.py", "from lightning_dp.engine.group import ReplicaGroup\nimport lightning"),
        ("measure/monitor.py", "from lightning import Callback"),
        ("internals/runs.py", "from hydra._internal.utils import get_args_parser"),
        ("app/train.py", "import hydra\nfrom lightning_dp import __version__"),
        ("engine/bucket.py", "if TYPE_CHECKING:\n    from lightning_dp.strategy import X"),
    ],
)
def test_right_imports_pass(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert violations(tmp_path) == []


def too_long(root: Path) -> list[str]:
    return [
        f"{file.relative_to(root)}: {len(lines)} lines"
        for file in sorted(root.rglob("*.py"))
        if len(lines := file.read_text().splitlines()) > MAX_LINES
        and not any(re.search(r"longer than (the )?others", line) for line in lines)
    ]


def test_a_long_file_says_why():
    assert too_long(ROOT) == []


def test_control_a_long_file_without_a_reason_is_found(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * (MAX_LINES + 1))
    (tmp_path / "fine.py").write_text("# longer than others because\n" + "x = 1\n" * MAX_LINES)
    assert too_long(tmp_path) == [f"long.py: {MAX_LINES + 1} lines"]
