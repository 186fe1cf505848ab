"""Act once somebody imports a module: registries are filled without importing a library for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` once the module ``name`` is loaded: now, or when somebody imports it.

    A second call for the same ``name`` takes the place of the first where that still waits.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    waiting = [f for f in sys.meta_path if isinstance(f, _AfterImport) and f.name == name]
    for finder in waiting:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _AfterImport(name, act))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Acts when the module ``name`` has been imported; finds nothing itself."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the others find the module, and wrap its loader."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as ``inner`` does, then acts."""

    def __init__(self, inner: importlib.abc.Loader, act: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the inner loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the inner loader; then act. The module keeps no trace of this one."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._act(module)
