"""Data-parallel training for PyTorch Lightning: ``Trainer(strategy="lean_ddp")``.

The names are registered when Lightning is imported, before this or after it; Lightning and torch are not
imported for it. So ``lean-ddp --help``, which needs neither, answers at once.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_dp.registration import names, namespaces

if TYPE_CHECKING:
    from lightning_dp.measure.monitor import LeanDDPMonitor
    from lightning_dp.measure.stats import StepStats
    from lightning_dp.measure.timeline import StepTimeline
    from lightning_dp.strategy import LeanDDPStrategy

__version__ = "0.1.0"
__all__ = ["LeanDDPMonitor", "LeanDDPStrategy", "StepStats", "StepTimeline", "__version__"]

_HOMES = {
    "LeanDDPMonitor": "lightning_dp.measure.monitor",
    "LeanDDPStrategy": "lightning_dp.strategy",
    "StepStats": "lightning_dp.measure.stats",
    "StepTimeline": "lightning_dp.measure.timeline",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of this package, when it is asked for."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        module = f"{__name__}.{name}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _strategy(**arguments: Any) -> "LeanDDPStrategy":
    """What the registry holds until somebody imports the class, which then takes this place."""
    from lightning_dp.strategy import LeanDDPStrategy

    return LeanDDPStrategy(**arguments)


def _register(strategies: ModuleType) -> None:
    loaded = sys.modules.get("lightning_dp.strategy")
    names.register(strategies.StrategyRegistry, getattr(loaded, "LeanDDPStrategy", _strategy))


namespaces.after_import("lightning.pytorch.strategies", _register)
namespaces.explain(names.NAMES)
