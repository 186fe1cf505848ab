"""What a training step returned: a loss, a loss with a weight, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.window import WindowTotals
from lightning_dp.errors import ConfigError

log = logging.getLogger(__name__)


class LossWeights:
    """The weight of the micro-batch that runs now.

    Attributes:
        weight: What its loss counts: 1, or what ``training_step`` returned beside it.
        any_since_step: Whether a micro-batch of this rank has counted anything since the last step.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.any_since_step = False
        self._said_none = False
        self._said_empty = False

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
        output = self._read(output, group)
        self.any_since_step |= self.weight > 0
        return output

    def _read(self, output: Any, group: ReplicaGroup) -> Any:
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
        """Return the loss to back-propagate.

        A mean over no tokens is 0 / 0. Weight 0 says that it must not count, and NaN times 0 is NaN: such
        a micro-batch takes part with a loss of zero in place of its own.
        """
        if self.weight == 0 and not bool(loss.detach().isfinite()):
            return torch.zeros_like(loss, requires_grad=True)
        return loss if self.weight == 1.0 else loss * self.weight

    def after_step(self, step: int, totals: Callable[[], WindowTotals | None], rank: int) -> None:
        """Warn once, on rank 0, of an optimizer step for which nothing on any rank counted.

        Args:
            step: Number of the step, from 0.
            totals: Read only if this rank's micro-batches counted nothing: on an accelerator it waits.
            rank: This process.
        """
        counted, self.any_since_step = self.any_since_step, False
        if counted or self._said_empty or rank != 0:
            return
        window = totals()
        if window is not None and window.weight == 0:
            self._said_empty = True
            log.warning(
                "lean_ddp: step %d: every micro-batch on every rank had weight 0 or no loss, so nothing"
                " counted: gradients are zero, or None where no loss reached the parameter. The optimizer"
                " stepped with them; later steps of this kind are not reported.",
                step,
            )
