"""Data-parallel training for PyTorch Lightning: ``Trainer(strategy="lean_ddp")``.

The names are registered in ``lightning.pytorch`` and in ``pytorch_lightning`` when these are imported,
before this or after it; neither of them nor torch is imported for it. So ``lean-ddp --help``, which needs
none, answers at once.
"""

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_dp.errors import ConfigError
from lightning_dp.internals import binding
from lightning_dp.registration import names
from lightning_dp.registration.after_import import after_import

if TYPE_CHECKING:
    from lightning_dp.measure.monitor import LeanDDPMonitor
    from lightning_dp.measure.noise_scale import NoiseScale
    from lightning_dp.measure.stats import StepStats
    from lightning_dp.measure.timeline import StepTimeline
    from lightning_dp.step.lr_scaling import LRScaling
    from lightning_dp.strategy import LeanDDPStrategy

__version__ = "0.1.0"
__all__ = [
    "LRScaling",
    "LeanDDPMonitor",
    "LeanDDPStrategy",
    "NoiseScale",
    "StepStats",
    "StepTimeline",
    "__version__",
]

_HOMES = {
    "LRScaling": "lightning_dp.step.lr_scaling",
    "LeanDDPMonitor": "lightning_dp.measure.monitor",
    "LeanDDPStrategy": "lightning_dp.strategy",
    "NoiseScale": "lightning_dp.measure.noise_scale",
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


def _strategy(package: str, **arguments: Any) -> "LeanDDPStrategy":
    """What a registry holds until the class is imported, which then takes this place in its own package."""
    binding.bind(package, "a Trainer that asked for lean_ddp by name")
    from lightning_dp.strategy import LeanDDPStrategy

    return LeanDDPStrategy(**arguments)


def _register(package: str, strategies: ModuleType) -> None:
    loaded = getattr(sys.modules.get("lightning_dp.strategy"), "LeanDDPStrategy", None)
    ours = loaded is not None and binding.bound().package == package
    strategy = loaded if loaded is not None and ours else partial(_strategy, package)
    names.register(strategies.StrategyRegistry, strategy)


def _not_for_fabric(**_: Any) -> None:
    raise ConfigError(binding.FABRIC)


def _refuse_in_fabric(strategies: ModuleType) -> None:
    names.register(strategies.STRATEGY_REGISTRY, _not_for_fabric)


for _package, _trainer in binding.TRAINERS.items():
    after_import(f"{_trainer}.strategies", partial(_register, _package))
    after_import(f"{binding.FABRICS[_package]}.strategies", _refuse_in_fabric)
