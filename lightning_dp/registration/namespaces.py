"""A user of ``pytorch_lightning`` is told which import to use.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of one library: two registries, two families
of classes. A strategy of one is no strategy for the other's Trainer, which says "invalid strategy name"
and nothing more. So our names are put into the other registry too, where they raise one sentence, and
the strategy's ``repr``, which that message shows, says the same.

Neither library is imported for this: a finder waits for the module that holds the registry.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from lightning_dp.errors import ConfigError

OTHER = "pytorch_lightning"
ADVICE = (
    "lean_ddp is built for lightning.pytorch, and your Trainer is pytorch_lightning's. Fix: write "
    "'import lightning.pytorch as pl' in place of 'import pytorch_lightning as pl', everywhere."
)


def explain(names: Iterable[str]) -> None:
    """Put ``names`` into ``pytorch_lightning``'s registry, now or when somebody imports it.

    Args:
        names: Under which our strategy is registered in ``lightning.pytorch``.
    """
    known = tuple(names)
    after_import(f"{OTHER}.strategies", lambda module: _register(module, known))


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


def refuse(**_: Any) -> None:
    """Stand in for the strategy in the other registry.

    Raises:
        ConfigError: Always, with the import to use.
    """
    raise ConfigError(f"[lean_ddp] {ADVICE}")


def describe(strategy: object) -> str:
    """The ``repr`` of a strategy, with the advice where the other library is loaded."""
    plain = object.__repr__(strategy)
    return f"{plain[:-1]}: {ADVICE}>" if OTHER in sys.modules else plain


def _register(module: ModuleType, names: Iterable[str]) -> None:
    registry = getattr(module, "StrategyRegistry", None)
    if registry is None:
        return
    for name in names:
        if name not in registry:
            registry.register(name, refuse, description=ADVICE)


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
