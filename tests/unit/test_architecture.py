"""Imports go one way and never in a circle, private names stay in internals/, files and functions end.

Each rule has a control that fails. What the package still breaks is listed here once, and an entry that is
no longer needed fails, so that the lists can only shrink.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import Sampler

PACKAGE = "lightning_dp"
ROOT = Path(__file__).parents[2] / PACKAGE

# What still breaks a rule.
KNOWN: dict[str, set[str]] = {
    # rooms whose files import each other
    "circle": set(),
    # private names of others outside of internals/
    "private": {
        "launch: _strategy",
        "launch: _recover_results_in_main_process",
        "launch: _wrapping_function",
        "strategy: _configure_launcher",
        "strategy: _start_method",
        "strategy: _timeout",
    },
    "long file": set(),
    "long function": set(),
}

# Left may not import right. A top-level module that is not listed belongs to the strategy's layer.
LAYERS = {
    "errors": 0,
    "engine": 1,
    "data": 1,
    "registration": 1,
    "internals": 2,
    "options": 2,
    "faults": 2,
    "optim": 2,
    "measure": 2,
    "step": 3,
    "data_plane": 3,
    "launch": 3,
}
STRATEGY, INIT, APP = 4, 5, 6
LAYERS |= {"__init__": INIT, "app": APP, "conf": APP}
# Rooms of one layer that may not know each other.
APART = ({"engine", "data", "registration"}, {"step", "data_plane", "launch"})

# The demos are written as a user would write them.
KNOWS_NOTHING_OF_US = {"demos"}
CALLBACKS = {
    "monitor",
    "noise_scale",
    "profile",
    "timeline",
}  # of measure/: what a user adds to a Trainer
TORCH_ONLY = {"errors", "engine", "data", "optim"}
INTERNALS = "internals"
OPTIONAL = {"ray"}  # needs the library of this name, which need not be installed
TORCH_INTERNALS = "internals.autograd"  # knows torch only: the engine may ask it
LIGHTNING = "internals.lightning"  # the only file that imports Lightning; the demos may ask it too
LIGHTNINGS = {"lightning", "pytorch_lightning", "lightning_fabric"}
# Names with an underscore that their owners document for everybody.
PUBLIC = {"_exit", "_fields", "_replace", "_asdict"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 40


def unit_of(path: Path) -> str:
    """``engine`` for ``engine/bucket.py``, ``strategy`` for ``strategy.py``."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def layer_of(unit: str) -> int:
    return LAYERS.get(unit, STRATEGY)


def judge(rule: str, found: set[str]) -> None:
    """Nothing new breaks ``rule``, and what is known to break it still does."""
    assert found - KNOWN[rule] == set()
    assert KNOWN[rule] - found == set(), f"mended: take it off KNOWN[{rule!r}]"


def parsed(root: Path) -> dict[Path, ast.Module]:
    """Every file's tree, by its path below ``root``."""
    return {p.relative_to(root): ast.parse(p.read_text()) for p in sorted(root.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC | {"_"}


# Directions


def imports_of(tree: ast.AST, path: Path) -> Iterator[str]:
    """Yield every imported name, wherever the import stands."""
    inside = [PACKAGE, *path.with_suffix("").parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: -node.level] if node.level else []  # from . import x
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_imports(root: Path) -> list[str]:
    return [
        f"{path.as_posix()} imports {name}: {reason}"
        for path, tree in parsed(root).items()
        for name in imports_of(tree, path)
        if (reason := refused(path, unit_of(path), name))
    ]


def refused(path: Path, unit: str, name: str) -> str | None:
    top, *rest = name.split(".")
    if top != PACKAGE and any(is_private(part) for part in rest):
        return None if unit == INTERNALS else "private names live in internals/"
    if top in LIGHTNINGS and f"{PACKAGE}.{LIGHTNING}" != ".".join(
        [PACKAGE, *path.with_suffix("").parts]
    ):
        return "only internals/lightning.py imports Lightning"
    if name.startswith(f"{PACKAGE}.{LIGHTNING}."):
        if unit == "measure" and path.stem not in CALLBACKS:
            return "only callbacks speak to Lightning"
        if unit in KNOWS_NOTHING_OF_US:
            return None
    if top == PACKAGE:
        if unit in KNOWS_NOTHING_OF_US and rest[0] not in KNOWS_NOTHING_OF_US:
            return "the demos know nothing of us"
        # `from lightning_dp import x` may name a module or something of __init__
        other = rest[0] if rest and (ROOT / rest[0]).exists() else None
        other = other or (rest[0] if rest and (ROOT / f"{rest[0]}.py").exists() else "__init__")
        if other == unit or name.startswith(f"{PACKAGE}.{TORCH_INTERNALS}"):
            return None
        if layer_of(other) > layer_of(unit):
            return f"{unit} lies left of {other}"
        if any({other, unit} <= rooms for rooms in APART):
            return f"{unit} and {other} do not know each other"
        return None
    if top in ("hydra", "omegaconf") and unit not in ("app", INTERNALS):
        return "hydra is for the application"
    if unit in TORCH_ONLY and top not in {"torch", "__future__"} | sys.stdlib_module_names:
        return f"{unit} imports torch and the standard library only"
    return None


def test_imports_go_one_way():
    assert wrong_imports(ROOT) == []


def write(root: Path, **files: str) -> Path:
    """Files by path, ``/`` spelt ``__``."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("errors", "from lightning_dp.engine.bucket import Bucket"),
        ("engine__bucket", "import lightning_dp.strategy"),
        ("engine__bucket", "from lightning_dp.data import order"),
        ("engine__bucket", "if TYPE_CHECKING:\n    from lightning_dp.strategy import X"),
        ("engine__bucket", "from lightning_dp.internals import trainer"),
        ("data__order", "from lightning_dp.engine import bucket"),
        ("engine__bucket", "from lightning_dp.internals.lightning import pl"),
        ("strategy", "import lightning as L"),
        ("internals__trainer", "from pytorch_lightning.callbacks import Callback"),
        ("step__driver", "if TYPE_CHECKING:\n    import lightning.pytorch as pl"),
        ("app__train", "def f():\n    from lightning_fabric import Fabric"),
        ("engine__bucket", "def f():\n    from lightning.pytorch import Trainer"),
        ("data__order", "import numpy"),
        ("data__order", "from torch._utils import _flatten_dense_tensors"),
        ("faults__record", "from ..strategy import LeanDDPStrategy"),
        ("step__driver", "from lightning_dp.data_plane.plane import DataPlane"),
        ("step__driver", "from lightning_dp.strategy import LeanDDPStrategy"),
        ("measure__stats", "from lightning_dp.internals.lightning import pl"),
        ("strategy", "from lightning_dp import __version__"),
        ("strategy", "from lightning_dp.app.train import train"),
        ("strategy", "import hydra"),
        ("launch__launcher", "def f():\n    from hydra.core.hydra_config import HydraConfig"),
        ("engine__internals", "from torch._utils import x"),
        ("strategy", "from hydra._internal.utils import get_args_parser"),
        ("demos__digits", "import lightning_dp.engine"),
    ],
)
def test_control_each_wrong_import_is_found(tmp_path, file, line):
    assert len(wrong_imports(write(tmp_path, **{file: line}))) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("engine__bucket", "from lightning_dp.errors import ConfigError"),
        ("engine__bucket", "from lightning_dp.internals.autograd import graph_task_id"),
        ("internals__autograd", "from torch._C import _functions"),
        (
            "faults__watch",
            "from lightning_dp.engine.group import ReplicaGroup\n"
            "from lightning_dp.internals.lightning import pl",
        ),
        ("measure__monitor", "from lightning_dp.internals.lightning import Callback"),
        ("demos__digits", "from lightning_dp.internals.lightning import pl"),
        ("internals__lightning", "import lightning.pytorch as pl"),
        ("internals__runs", "from hydra._internal.utils import get_args_parser"),
        ("app__train", "import hydra\nfrom lightning_dp import __version__"),
    ],
)
def test_right_imports_pass(tmp_path, file, line):
    assert wrong_imports(write(tmp_path, **{file: line})) == []


# Circles


def import_graph(root: Path) -> dict[str, set[str]]:
    """For each file the files that it imports, also in functions and for type checkers only."""
    trees = parsed(root)
    files = {".".join([PACKAGE, *path.with_suffix("").parts]): path for path in trees}

    def file_of(name: str) -> str | None:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            for candidate in (module, f"{module}.__init__"):
                if candidate in files:
                    return files[candidate].as_posix()
        return None

    return {
        path.as_posix(): {found for name in imports_of(tree, path) if (found := file_of(name))}
        - {path.as_posix()}
        for path, tree in trees.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Files that reach each other (the strongly connected components of more than one file)."""

    def reach(file: str) -> set[str]:
        seen: set[str] = set()
        left = [file]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        return seen

    reached = {file: reach(file) for file in graph}
    found = {
        tuple(sorted(other for other in reached[file] if file in reached[other]))
        for file in graph
        if file in reached[file]
    }
    return [list(circle) for circle in sorted(found)]


def test_no_circle_of_files():
    found = circles(import_graph(ROOT))
    judge("circle", {" ".join(sorted({unit_of(Path(f)) for f in circle})) for circle in found})


@pytest.mark.parametrize(
    "back",
    [
        "from lightning_dp.engine.a import x",
        "from lightning_dp.engine import a",
        "import lightning_dp.engine.a",
        "from .a import x",
        "def f():\n    from lightning_dp.engine.a import x",
        "if TYPE_CHECKING:\n    from lightning_dp.engine.a import x",
    ],
)
def test_control_a_circle_through_another_file_is_found(tmp_path, back):
    there = "from lightning_dp.engine.b import x"
    on = "from lightning_dp.engine.c import x"
    write(tmp_path, engine__a=there, engine__b=on, engine__c=back, engine__d=there)
    found = circles(import_graph(tmp_path))
    assert found == [["engine/a.py", "engine/b.py", "engine/c.py"]]
    (tmp_path / "engine/c.py").write_text("import torch\n")
    assert circles(import_graph(tmp_path)) == []


# Private names


def attributes_defined(tree: ast.Module) -> set[str]:
    """What this file's classes define: methods, class attributes, fields, ``self.x = ...``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(inner.name)
                elif isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            found.add(node.attr)
    return found


def private_names(tree: ast.Module) -> set[str]:
    """Private attributes that no class of this file defines: they belong to somebody else."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            name = node.args[1]
            by_name = ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
            if by_name and isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value)
    return {name for name in found if is_private(name)} - attributes_defined(tree)


def replaced(cls: type) -> set[str]:
    """Private methods of a foreign base class that ``cls`` replaces."""
    foreign = [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] != PACKAGE]
    return {
        name
        for name, value in vars(cls).items()
        if is_private(name) and inspect.isfunction(value)
        if any(name in vars(base) for base in foreign if base.__module__ != "enum")
    }


def classes() -> Iterator[tuple[str, type]]:
    """Every class of the package with its room."""
    for path in parsed(ROOT):
        if path.name == "__main__.py" or unit_of(path) in KNOWS_NOTHING_OF_US:
            continue
        if unit_of(path) in OPTIONAL and importlib.util.find_spec(path.stem) is None:
            continue
        module = importlib.import_module(".".join([PACKAGE, *path.with_suffix("").parts]))
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                yield unit_of(path), cls


def foreign_private(root: Path) -> set[str]:
    """Private names outside of internals/ that are not the file's own, with their rooms."""
    return {
        f"{unit_of(path)}: {name}"
        for path, tree in parsed(root).items()
        if unit_of(path) != INTERNALS
        for name in private_names(tree)
    }


def test_private_names_of_others_stay_in_internals():
    methods = {
        f"{room}: {name}" for room, cls in classes() if room != INTERNALS for name in replaced(cls)
    }
    judge("private", foreign_private(ROOT) | methods)


@pytest.mark.parametrize(
    "line",
    [
        "trainer._callback_connector.run()",
        "x = loader._index_sampler",
        "torch._C._current_graph_task_id()",
        "self.trainer._signal_connector = None",
        "def _version(t):\n    return t._version",
        "class A(Base):\n    def f(self):\n        return self._of_the_base",
        'getattr(module, "_ignored", ())',
        'hasattr(torch.nn.Module, "_wrapped")',
        "class A:\n    def f(self, other):\n        other._x = 1",
    ],
)
def test_control_a_private_name_is_found_by_attribute(tmp_path, line):
    assert len(foreign_private(write(tmp_path, strategy=line))) >= 1
    assert foreign_private(write(tmp_path / "inside", internals__trainer=line)) == set()


@pytest.mark.parametrize(
    "line",
    [
        "class A:\n    def __init__(self):\n        self._x = 1\n\n\ndef f(a: A):\n    return a._x",
        "class A:\n    _x: int = 0\n    def f(self):\n        return self._f() + self._x\n"
        "    def _f(self):\n        return 0",
        "os._exit(1)\nrow._replace(a=1)\nrow.__dict__",
        "for _ in range(3):\n    pass",
    ],
)
def test_a_files_own_private_names_pass(tmp_path, line):
    assert foreign_private(write(tmp_path, strategy=line)) == set()


def test_control_a_replaced_private_method_is_found():
    class Ours(Sampler):  # a foreign base
        def _own(self):
            return 0

    assert replaced(Ours) == set()
    Sampler._own = Ours._own
    try:
        assert replaced(Ours) == {"_own"}
    finally:
        del Sampler._own


# Length


def long_functions(root: Path) -> set[str]:
    """Functions of more than ``MAX_FUNCTION_LINES``, without their docstrings."""
    found = set()
    for path, tree in parsed(root).items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.add(f"{path.as_posix()}: {node.name}")
    return found


def long_files(root: Path) -> list[str]:
    return [
        f"{path.as_posix()}: {lines} lines"
        for path in parsed(root)
        if (lines := len((root / path).read_text().splitlines())) > MAX_FILE_LINES
    ]


def test_files_and_functions_end():
    judge("long file", {line.partition(":")[0] for line in long_files(ROOT)})
    judge("long function", long_functions(ROOT))


def test_control_a_long_file_and_a_long_function_are_found(tmp_path):
    write(tmp_path, long="x = 1\n" * MAX_FILE_LINES, fine="x = 1\n" * (MAX_FILE_LINES - 1))
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    doc = '    """One\n\n    Two."""\n'
    text = f"def f():\n{doc}{body}\n\ndef g():\n{body}    y\n\n\nasync def h():\n{body}    y"
    write(tmp_path, f=text)
    assert long_files(tmp_path) == [f"long.py: {MAX_FILE_LINES + 1} lines"]
    assert long_functions(tmp_path) == {"f.py: g", "f.py: h"}
