"""A user of ``pytorch_lightning`` is told which import to use.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of one library: two registries, two families
of classes. A strategy of one is no strategy for the other's Trainer, which says "invalid strategy name"
and nothing more. So our names are put into the other registry too, where they raise one sentence, and
the strategy's ``repr``, which that message shows, says the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
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
    if OTHER in sys.modules:
        _register(known)
        return
    finders = [finder for finder in sys.meta_path if isinstance(finder, _AfterImport)]
    if not finders:
        sys.meta_path.insert(0, _AfterImport(known))


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


def _register(names: Sequence[str]) -> None:
    registry = getattr(sys.modules.get(f"{OTHER}.strategies"), "StrategyRegistry", None)
    if registry is None:
        return
    for name in names:
        if name not in registry:
            registry.register(name, refuse, description=ADVICE)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers when ``pytorch_lightning.strategies`` has been imported; finds nothing itself."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the others find the module, and wrap its loader."""
        if fullname != f"{OTHER}.strategies" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._names)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as ``inner`` does, then registers."""

    def __init__(self, inner: importlib.abc.Loader, names: Sequence[str]) -> None:
        self._inner = inner
        self._names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the inner loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the inner loader; then register."""
        self._inner.exec_module(module)
        _register(self._names)
