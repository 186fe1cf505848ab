"""What a training step returned: a loss, a loss with a weight, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.control import WindowTotals
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.errors import ConfigError

log = logging.getLogger(__name__)

KEY = "loss_weight"  # one that no module uses for anything else
_LOOKS_LIKE_IT = "weight"


def reads_loss(optimizer: Optimizer, free: bool) -> bool:
    """Whether an optimizer may decide by what its closure returns, as a line search does.

    Of torch's only LBFGS does. Of others nobody knows: they get the mean where it is ``free``.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    return free and not type(optimizer).__module__.startswith("torch.optim")


def mean_loss(output: Any, totals: WindowTotals | None, group: ReplicaGroup) -> Any:
    """What a closure returns to an optimizer that reads it: the loss over all ranks.

    Ranks that decide by losses of their own take other steps, or run their closures more or fewer times.

    Args:
        output: This rank's loss, or anything else, which is returned as it is.
        totals: Of the closure's window; ``None`` in manual optimization, where windows know no loss.
        group: Who takes part.

    Collective: every rank, without ``totals``. Blocks.
    """
    if not isinstance(output, Tensor) or output.numel() != 1:
        return output
    mean = output.detach().clone()
    if totals is None:
        group.all_reduce_mean(mean)
        return mean
    return mean.fill_(totals.loss)


class LossWeights:
    """The weight of the micro-batch that runs now, and the number that all weights are divided by.

    [Note: one reference] What is multiplied with a loss is its weight over a reference that all ranks
    agree on (see ``engine/reduction/window.py``). The ranks exchange their first weights; from then on it
    is the mean weight of the last window that all have read.

    Args:
        window: Counts micro-batches.
        group: Who takes part.
    """

    def __init__(self, window: AccumulationWindow, group: ReplicaGroup) -> None:
        self._window = window
        self._group = group
        self._weight: Tensor | float = 1.0
        self._agreed = False
        self._uses_weights = False
        self._counted = (
            False  # a micro-batch of this rank has counted something since the last step
        )
        self._warned_none = self._warned_empty = self._warned_key = False
        window.reference = 1.0

    def weigh(self, output: Any) -> Any:
        """Read the weight of ``training_step``'s output.

        Args:
            output: A loss, a dict with ``loss`` and perhaps ``loss_weight``, or ``None``; alone in the
                world,
                ``None`` skips the step, as in Lightning.

        Returns:
            ``output``; in place of ``None`` a loss of zero, with which this rank takes part in the
            reduction and counts nothing.

        Raises:
            ConfigError: The weight is not a number, or below zero.

        Collective: every rank, in the first micro-batch only.
        """
        self._weight, given = 1.0, False
        if output is None and self._group.world_size > 1:
            output = self._no_loss()
        elif isinstance(output, dict):
            given = output.get(KEY) is not None
            if given:
                self._weight = self._read(output[KEY])
            elif not self._warned_key and _is_number(output.get(_LOOKS_LIKE_IT)):
                self._explain_key()
        if not self._agreed:
            self._agree(given)
        self._counted |= isinstance(self._weight, Tensor) or self._weight > 0
        return output

    def _read(self, value: Any) -> Tensor | float:
        if isinstance(value, Tensor) and value.ndim == 0 and not self._may_read(value):
            return value.detach()
        try:
            if isinstance(value, bool) or (isinstance(value, Tensor) and value.ndim):
                raise TypeError
            weight = float(value)
        except (TypeError, ValueError):
            weight = float("nan")
        if not 0 <= weight < float("inf"):
            raise ConfigError(
                f"[rank {self._group.rank}] training_step returned {KEY}={value!r}; a weight is the"
                " number of samples or tokens behind the mean loss: one finite number (or 0-dim tensor), 0"
                " or more."
            )
        return weight

    def _may_read(self, value: Tensor) -> bool:
        # The first one is read in any case: the ranks compare it.
        free = self._group.host_reads_are_free or self._group.device.type != "cpu"
        return (value.device.type == "cpu" and free) or not self._agreed

    def _agree(self, given: bool) -> None:
        """Make the largest of the ranks' first weights the reference: equal ones are then 1 exactly."""
        self._agreed = True
        first = float(self._weight) if given else None
        weights = [w for w in self._group.all_gather_object(first) if w is not None]
        self._uses_weights = self._window.given = bool(weights)
        # A window that was restored half done keeps what its weights are multiples of.
        if not self._window.position:
            self._window.reference = max(weights, default=0.0) or 1.0

    def _no_loss(self) -> Tensor:
        self._weight = 0.0
        if not self._warned_none:
            self._warned_none = True
            log.warning(
                "lean_ddp: training_step returned None on rank %d. This rank contributes nothing to such"
                " a step; the mean is over the ranks that have a loss.",
                self._group.rank,
            )
        return torch.zeros((), device=self._group.device, requires_grad=True)

    def _explain_key(self) -> None:
        self._warned_key = True
        if self._group.rank == 0:
            log.info(
                "lean_ddp: training_step returns 'weight', which means nothing here. If it is what the loss"
                " counts (samples or tokens behind a mean), return it as %r.",
                KEY,
            )

    def weighted(self, loss: Tensor, scaled: Tensor, divisor: int) -> Tensor:
        """Count the micro-batch; return the loss to back-propagate.

        A mean over no tokens is 0 / 0. Weight 0 says that it must not count, and NaN times 0 is NaN: such
        a micro-batch takes part with a loss of zero in place of its own. Where the host must not read the
        weight, a rank's gradients are emptied on the device if nothing in its window counted; in a window
        in which something did, the module has to keep such a mean finite (``sum / count.clamp(min=1)``).

        Args:
            loss: As the trainer has it: divided by ``divisor``.
            scaled: The same, times the scale of a gradient scaler.
            divisor: The window's length.
        """
        window = self._window
        wide = torch.promote_types(loss.dtype, torch.float32)  # half precision may not hold them
        mean: Tensor | float = loss.detach().to(wide) * divisor
        relative: Tensor | float
        if self._group.host_reads_are_free and loss.device.type == "cpu":
            mean = float(mean)  # plain numbers cost less there
        if isinstance(self._weight, Tensor):
            relative = self._weight.to(wide) / window.reference
            fine = (relative >= 0) & relative.isfinite()
            counted = torch.where(fine, relative, float("nan"))  # an error, when it is read
            relative = torch.where(fine, relative, 0.0)
            window.add(counted, torch.where(relative > 0, mean, 0.0), divisor)
            return scaled * relative
        relative = self._weight / window.reference
        window.add(relative, mean if relative else None, divisor)
        if relative == 0 and self._must_replace(loss):
            return torch.zeros_like(scaled, requires_grad=True)
        return scaled if relative == 1.0 else scaled * relative

    def _must_replace(self, loss: Tensor) -> bool:
        return not self._group.host_reads_are_free or not bool(loss.detach().isfinite())

    def begin_window(self, last: WindowTotals | None) -> None:
        """Make the mean weight of the last window the reference, if that is another number.

        Args:
            last: What all ranks have read; the same on all of them.
        """
        if not self._uses_weights or last is None or not last.micro_batches:
            return
        mean, before = last.weight / last.micro_batches, self._window.reference
        if mean > 0 and abs(mean / before - 1) > 4 * torch.finfo(torch.float32).eps:
            self._window.reference = mean

    def after_step(self, step: int, totals: Callable[[], WindowTotals | None]) -> None:
        """Warn once, on rank 0, of an optimizer step for which nothing on any rank counted.

        Args:
            step: Number of the step, from 0.
            totals: Read only if this rank's micro-batches counted nothing: on an accelerator it waits.
        """
        counted, self._counted = self._counted, False
        if counted or self._warned_empty or self._group.rank != 0:
            return
        window = totals()
        if window is not None and window.weight == 0:
            self._warned_empty = True
            log.warning(
                "lean_ddp: step %d: every micro-batch on every rank had weight 0 or no loss, so nothing"
                " counted: gradients are zero, or None where no loss reached the parameter. The optimizer"
                " stepped with them; later steps of this kind are not reported.",
                step,
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
