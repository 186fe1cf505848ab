"""The only file that imports Lightning; all others take its names from here.

Importing this file binds the process to one of Lightning's two packages (:mod:`.binding`). Type checkers
see ``lightning``. Both branches import the same names; a test compares them.
"""

from typing import TYPE_CHECKING

from lightning_dp.internals import binding

if TYPE_CHECKING or binding.bound().package == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.utilities import distributed
    from lightning.pytorch import callbacks
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.overrides import distributed as overrides
    from lightning.pytorch.plugins.io import wrapper
    from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        SingleDeviceStrategy,
        StrategyRegistry,
        launchers,
    )
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import exceptions
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
else:
    import pytorch_lightning as pl
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.utilities import distributed
    from pytorch_lightning import callbacks
    from pytorch_lightning.accelerators import Accelerator
    from pytorch_lightning.callbacks import Callback, ModelCheckpoint
    from pytorch_lightning.overrides import distributed as overrides
    from pytorch_lightning.plugins.io import wrapper
    from pytorch_lightning.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import (
        DDPStrategy,
        SingleDeviceStrategy,
        StrategyRegistry,
        launchers,
    )
    from pytorch_lightning.trainer import call
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities import exceptions
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.types import OptimizerLRScheduler

__all__ = [
    "Accelerator", "Callback", "CheckpointIO", "ClusterEnvironment", "DDPStrategy", "LayerSync",
    "ModelCheckpoint", "OptimizerLRScheduler", "Precision", "SIGTERMException", "SingleDeviceStrategy",
    "StrategyRegistry", "TorchCheckpointIO", "TorchSyncBatchNorm", "TrainerFn", "call", "callbacks",
    "distributed", "exceptions", "launchers", "overrides", "pl", "wrapper",
]  # fmt: skip
