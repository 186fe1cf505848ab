"""Programs that tests run start sooner: what libraries import and hardly ever use loads when it is used.

Python runs this file when a program starts whose PYTHONPATH names its folder, and when that starts its
ranks (``support/programs.py``). Of 6.6 s that a training takes to start, ``torch._dynamo`` takes 2.7, for
one class that ``isinstance`` is asked about; ``scipy.signal`` 1.2, for one name that it may have; and
matplotlib, through torchmetrics, 0.9, for the types of arguments. Here each is a module with those few
names. Whoever asks for another name gets the real module, executed then.
``multi_process/launch/test_sooner.py`` tests it.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

_LOCK = threading.RLock()


class Deferred(ModuleType):
    """A module of a few names until it is asked for another one; then the real one, in the same object."""

    def __getattr__(self, name: str) -> Any:
        asked_by_imports = name.startswith("__") and name != "__all__"
        if not asked_by_imports and execute(self):
            return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Later(Loader):
    """Makes a ``Deferred`` in place of executing a module."""

    def __init__(self, real: Any, few: Mapping[str, Any]) -> None:
        self.real, self.few = real, few

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self.few)


class _There(Loader):
    """For a module that came with its package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.module = sys.modules[spec.name]
        self.spec = self.module.__spec__
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class Finder:
    """Finds the modules that wait; a part of one that waits is found after it was executed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if name not in FEW:
            whole = execute(sys.modules.get(name.rpartition(".")[0]))
            return ModuleSpec(name, _There()) if whole and name in sys.modules else None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Later(spec.loader, FEW[name])
        return spec


def waits(module: object) -> bool:
    """Whether ``module`` is one that is not executed yet."""
    return isinstance(getattr(module, "__loader__", None), _Later)


def execute(module: Any) -> bool:
    """Make a ``Deferred`` the real module; False if it is already, or if this thread is about to."""
    with _LOCK:
        if not waits(module):
            return False
        execute(sys.modules.get(module.__name__.rpartition(".")[0]))
        if not waits(module):
            return True
        spec, few = module.__spec__, module.__loader__.few
        found = {name: module.__dict__.pop(name) for name in few}
        spec.loader = module.__loader__ = module.__loader__.real
        spec.loader.exec_module(module)
        for name in few:
            if found[name] is not few[name]:  # somebody has set it meanwhile
                setattr(module, name, found[name])
        return True


def of_the_real(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that waits."""

    def call(*args: Any, **kwargs: Any) -> Any:
        execute(sys.modules[module])
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call


class _IfThere(type):
    """Of a class that stands for one of a module that waits: until then nothing is of it."""

    module: str

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules[cls.module]
        return not waits(module) and isinstance(instance, getattr(module, cls.__name__))


class OptimizedModule(metaclass=_IfThere):
    """What ``torch.compile`` makes of a module."""

    module = "torch._dynamo"


class DTensor(metaclass=_IfThere):
    """What tensor parallelism makes of a parameter."""

    module = "torch.distributed.tensor"


def disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``fn``; not traced by a dynamo that is there when it is called."""
    if not isinstance(fn, FunctionType):
        execute(sys.modules["torch._dynamo"])
        return sys.modules["torch._dynamo"].disable(fn, *args, **kwargs)
    kept: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*inner: Any, **named: Any) -> Any:
        dynamo = sys.modules["torch._dynamo"]
        if not kept and not waits(dynamo):
            kept.append(dynamo.disable(fn, *args, **kwargs))
        return (kept[0] if kept else fn)(*inner, **named)

    return call


class _Rules:
    """``torch._dynamo.trace_rules``, whose caches a process group clears when it begins: empty ones."""

    def clear_lru_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        execute(sys.modules["torch._dynamo"])
        return getattr(sys.modules["torch._dynamo"].trace_rules, name)


_PLOT = "torchmetrics.utilities.plot"
FEW: dict[str, dict[str, Any]] = {
    "scipy.signal": {"hamming": None},
    "scipy.stats": {"rankdata": of_the_real("scipy.stats", "rankdata")},
    "torch._inductor": {},
    "torch._inductor.config": {"deterministic": False},
    "torch.distributed.tensor": {"DTensor": DTensor},
    "torch._dynamo": {
        "OptimizedModule": OptimizedModule,
        "disable": disable,
        "graph_break": lambda msg="": None,
        "trace_rules": _Rules(),
    },
    _PLOT: {
        **dict.fromkeys(("_AX_TYPE", "_CMAP_TYPE"), object),
        "_PLOT_OUT_TYPE": tuple[object, object],
        **{
            name: of_the_real(_PLOT, name)
            for name in ("plot_confusion_matrix", "plot_curve", "plot_single_or_multi_val")
        },
    },
}
sys.meta_path.insert(0, Finder())
# Imports make many objects that live on; to look at them again and again takes a sixth of their time.
gc.set_threshold(100_000)
