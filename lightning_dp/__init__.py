"""Data-parallel training for PyTorch Lightning: ``Trainer(strategy="lean_ddp")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.measure.monitor import LeanDDPMonitor
from lightning_dp.measure.stats import StepStats
from lightning_dp.measure.timeline import StepTimeline
from lightning_dp.namespaces import explain
from lightning_dp.strategy import LeanDDPStrategy

__version__ = "0.1.0"
__all__ = ["LeanDDPMonitor", "LeanDDPStrategy", "StepStats", "StepTimeline", "__version__"]

LeanDDPStrategy.register_strategies(StrategyRegistry)
explain(name for name in StrategyRegistry if name.startswith("lean_ddp"))
