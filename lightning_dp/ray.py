"""Ray Train starts the ranks: ``RayLeanDDPStrategy`` in the place of Ray's ``RayDDPStrategy``.

Needs ``pip install 'lightning_dp[ray]'``. Importing this file binds the process to the one of Lightning's
two packages that Ray uses.
"""

from __future__ import annotations

import time

try:
    from ray.train import get_context
    from ray.train.lightning import RayDDPStrategy
except ImportError as error:
    raise ImportError(
        "[lean_ddp] lightning_dp.ray needs Ray Train. Fix: pip install 'lightning_dp[ray]'"
    ) from error

from lightning_dp.errors import RankFailedError
from lightning_dp.internals import binding

binding.bind(binding.package_of(RayDDPStrategy) or "lightning", "an import of lightning_dp.ray")

from lightning_dp.strategy import LeanDDPStrategy  # noqa: E402  (after this process is bound)

__all__ = ["RayLeanDDPStrategy"]

_AFTER_THE_FIRST_S = 0.5


class RayLeanDDPStrategy(LeanDDPStrategy, RayDDPStrategy):  # type: ignore[misc]
    """Data-parallel training in Ray Train's workers. Takes the arguments of ``LeanDDPStrategy``.

    Device, ranks and process group are Ray's, whatever the Trainer's ``devices`` and ``num_nodes`` say.
    Loaders are shared as everywhere; shards of ``ray.data`` are a rank's own already and stay as they are.

    Example:
        ``Trainer(strategy=RayLeanDDPStrategy(), plugins=[RayLightningEnvironment()])``, then Ray's
        ``prepare_trainer(trainer)``, inside of the function that ``TorchTrainer`` runs.

    Raises:
        TypeError: As ``LeanDDPStrategy``.
        ConfigError: As ``LeanDDPStrategy``.
    """

    @property
    def num_processes(self) -> int:
        """Ranks on this machine. A Trainer in a worker sees the worker's devices only."""
        return int(get_context().get_local_world_size())

    def on_exception(self, exception: BaseException) -> None:
        """As the parent. Ray shows the errors that it finds first, so the rank that failed leaves first."""
        super().on_exception(exception)
        if isinstance(exception, RankFailedError):
            time.sleep(_AFTER_THE_FIRST_S)
