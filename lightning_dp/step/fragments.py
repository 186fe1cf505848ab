"""Which parameters are sent together: those of one optimizer, and of one fragment of the model.

Parameters with different numbers never share a bucket, so a part of the model can be sent alone. With
``outer`` in fragments, each fragment is such a part. A parameter is in one of them whole: the largest ones
first, each to the fragment that has least, so that messages are about equal.

Source: fragments that take turns, Streaming DiLoCo (arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_dp.step.optimizer_groups import OptimizerGroups


class Fragments:
    """Gives each parameter its number; the same on all ranks.

    Args:
        count: How many fragments.
        optimizers: Which optimizer a parameter belongs to.
        parameters: By name.
    """

    def __init__(
        self, count: int, optimizers: OptimizerGroups, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.count = count
        self._optimizers = optimizers
        self._of: dict[str, int] = {}
        self._bytes = {True: [0] * count, False: [0] * count}  # of trainable and of frozen ones
        for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].nbytes):
            self._place(name, parameter)

    def _place(self, name: str, parameter: nn.Parameter) -> int:
        held = self._bytes[parameter.requires_grad]  # what is frozen may never be sent
        number = self._of[name] = held.index(min(held))
        held[number] += parameter.nbytes
        return number

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each fragment's trainable parameters."""
        return self._bytes[True]

    def partition(self, name: str, parameter: nn.Parameter) -> int:
        """The number of a parameter; one that was not there at the start joins the smallest fragment."""
        fragment = self._of[name] if name in self._of else self._place(name, parameter)
        return fragment * self._optimizers.most + self._optimizers.partition(parameter)

    def of(self, partition: int) -> int:
        """The fragment of parameters with this number."""
        return partition // self._optimizers.most

    def of_optimizer(self, index: int | None) -> frozenset[int] | None:
        """All numbers of one optimizer's parameters; ``None`` means all there are."""
        if index is None:
            return None
        return frozenset(index + fragment * self._optimizers.most for fragment in range(self.count))

    def of_fragment(self, number: int) -> frozenset[int] | None:
        """All numbers of one fragment's parameters; ``None`` means all there are."""
        most = self._optimizers.most
        return None if self.count == 1 else frozenset(range(number * most, (number + 1) * most))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: how many there are, and each parameter's, by name."""
        return {"count": self.count, "of": dict(self._of)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over those of a run that is resumed, for parameters without a bucket. Local."""
        self._of.update(state["of"])
