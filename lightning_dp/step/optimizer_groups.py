"""Which optimizer a parameter belongs to: buckets of two optimizers never mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_SCALARS = (bool, int, float, complex, str, tuple, type(None))


class OptimizerGroups:
    """A look at the optimizers' parameter groups; owns nothing.

    Attributes:
        optimizers: As the Trainer has them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self._members: dict[int, list[int]] | None = None  # by id, until groups may have changed
        self._seen = self._count()

    def _count(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self.optimizers)

    def have_grown(self) -> bool:
        """Whether a group was added or removed since the last time this was asked."""
        before, self._seen = self._seen, self._count()
        self._members = None  # a group may also have been given other parameters
        return before != self._seen

    @property
    def most(self) -> int:
        """How many numbers :meth:`partition` may return."""
        return len(self.optimizers) + 1

    def partition(self, parameter: nn.Parameter) -> int:
        """The number of the parameter's optimizer; one above the last for a parameter without."""
        return next(iter(self.all_of(parameter)), len(self.optimizers))

    def all_of(self, parameter: nn.Parameter) -> list[int]:
        """The numbers of all optimizers that have the parameter; usually one."""
        if self._members is None:
            self._members = {}
            for index, optimizer in enumerate(self.optimizers):
                for group in optimizer.param_groups:
                    for member in group["params"]:
                        self._members.setdefault(id(member), []).append(index)
        return self._members.get(id(parameter), [])

    def settings(self) -> dict[str, Any]:
        """Learning rates and the other scalars of all groups, by name. The host waits for the device."""
        return {
            f"{key} of optimizer {index} ({type(optimizer).__name__}), group {number}": (
                value.item() if isinstance(value, Tensor) else value
            )
            for index, optimizer in enumerate(self.optimizers)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, _SCALARS) or (isinstance(value, Tensor) and value.numel() == 1)
        }

    def index(self, optimizer: Optimizer) -> int | None:
        """The number of ``optimizer``, also of a wrapped one; ``None`` for a stranger."""
        plain = getattr(optimizer, "optimizer", optimizer)
        for index, other in enumerate(self.optimizers):
            if other is plain or other is optimizer:
                return index
        return None
