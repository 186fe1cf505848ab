"""What a training step returned: a loss, a loss with a weight, or nothing."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.errors import ConfigError

log = logging.getLogger(__name__)


class LossWeights:
    """The weight of the micro-batch that runs now.

    Attributes:
        weight: What its loss counts: 1, or what ``training_step`` returned beside it.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self._said_none = False

    def weigh(self, output: Any, group: ReplicaGroup) -> Any:
        """Read the weight of ``training_step``'s output.

        Args:
            output: A loss, a dict with ``loss`` and perhaps ``weight``, or ``None``.
            group: Alone in the world, ``None`` skips the step, as in Lightning.

        Returns:
            ``output``; in place of ``None`` a loss of zero, with which this rank takes part in the
            reduction and counts nothing.

        Raises:
            ConfigError: The weight is not a number, or below zero.
        """
        self.weight = 1.0
        if output is None and group.world_size > 1:
            return self._no_loss(group)
        if isinstance(output, dict) and output.get("weight") is not None:
            try:
                self.weight = float(output["weight"])
            except (TypeError, ValueError):
                self.weight = float("nan")
            if not 0 <= self.weight < float("inf"):
                raise ConfigError(
                    f"training_step returned weight={output['weight']!r}; a weight is the number of samples"
                    " or tokens behind the mean loss: one finite number, 0 or more."
                )
        return output

    def _no_loss(self, group: ReplicaGroup) -> Tensor:
        self.weight = 0.0
        if not self._said_none:
            self._said_none = True
            log.warning(
                "lean_ddp: training_step returned None on rank %d. This rank contributes nothing to such"
                " a step; the mean is over the ranks that have a loss.",
                group.rank,
            )
        return torch.zeros((), device=group.device, requires_grad=True)

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss to back-propagate."""
        return loss if self.weight == 1.0 else loss * self.weight
