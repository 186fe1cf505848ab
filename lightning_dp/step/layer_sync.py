"""``sync_batchnorm=True`` on a CPU."""

from __future__ import annotations

from torch import nn

from lightning_dp.engine.replicas.sync_batch_norm import revert_batch_norms, synchronize_batch_norms
from lightning_dp.internals.lightning import LayerSync


class CPULayerSync(LayerSync):
    """In place of Lightning's plugin, whose layers raise for input on a CPU."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Let every BatchNorm use the batches of all ranks."""
        synchronize_batch_norms(model)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give every BatchNorm its own class back."""
        revert_batch_norms(model)
        return model
