"""One meeting of one fragment: what the ranks changed, averaged as gradients are.

A meeting is a reduction without a backward: the changes (anchor - local weights) stand in ``.grad`` while
they are sent and while their means are taken, so that what holds for gradients (any type, any wire,
weights, errors, signs of the step) holds for them. In between, ``.grad`` is the local steps' own.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.reduction import copies
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow


@dataclass
class Anchor:
    """One parameter as all ranks last agreed on it, and what the outer optimizer keeps of it."""

    value: Tensor
    momentum: Tensor | None = None


@dataclass
class Round:
    """What this rank's local steps counted since a fragment was last sent, as in an accumulation window."""

    weight: Tensor | float = 0.0
    micro_batches: int = 0
    loss: Tensor | float = 0.0
    steps: int = 0

    def add(self, window: Round) -> None:
        """Count one step's window; a closure that ran many times is one."""
        self.weight = self.weight + window.weight
        self.micro_batches += window.micro_batches
        self.loss = self.loss + window.loss
        self.steps += 1


@dataclass
class Meeting:
    """The changes of one fragment, from when they are sent until they are applied.

    Attributes:
        fragment: Its number.
        left: Local steps until they are applied.
        partitions: The numbers of its parameters.
        means: Mean changes by name, if they have arrived.
    """

    fragment: int
    left: int
    partitions: frozenset[int] | None
    means: Mapping[str, Tensor] | None = None
    _slots: Sequence[Slot] = ()

    @torch.no_grad()
    def send(
        self,
        reducer: Reducer,
        changed: Sequence[tuple[Slot, Anchor]],
        so_far: Round,
    ) -> None:
        """Send what this rank changed.

        Args:
            reducer: Averages it.
            changed: The fragment's parameters that may have changed.
            so_far: What the changes weigh.

        Collective: every rank, at the same step. Does not block, but the first time.
        """
        self._slots = [slot for slot, _ in changed]
        divisor = reducer.window.divisor
        with self._lent(reducer):
            share = _put_into_window(reducer.window, so_far)
            for slot, anchor in changed:
                slot.param.requires_grad_(True)  # what was frozen in the round has changed too
                slot.param.grad = anchor.value - slot.param
            copies.scale((slot.param.grad for slot in self._slots), share)
            if not reducer.send_now(self.partitions):
                self._take(reducer)
        reducer.window.divisor = divisor

    @torch.no_grad()
    def arrive(self, reducer: Reducer) -> Mapping[str, Tensor]:
        """Wait for the mean changes, by name.

        Raises: as :meth:`Reducer.finalize`.

        Collective: every rank, at the same step; nothing if they have arrived. Blocks, the host too.
        """
        if self.means is None:
            with self._lent(reducer):
                reducer.receive()
                self._take(reducer)
        assert self.means is not None
        return self.means

    def _take(self, reducer: Reducer) -> None:
        reducer.settle()
        means = {slot.name: slot.param.grad for slot in self._slots if not slot.removed}
        self.means = {
            name: mean.to_dense() if mean.is_sparse else mean
            for name, mean in means.items()
            if mean is not None
        }

    @contextmanager
    def _lent(self, reducer: Reducer) -> Generator[None]:
        """While in this context ``.grad`` is the meeting's; not put back after an error."""
        slots = [
            slot
            for slot in reducer.registry.slots
            if not slot.removed and (self.partitions is None or slot.partition in self.partitions)
        ]
        kept = [(slot.param, slot.param.grad, slot.param.requires_grad) for slot in slots]
        for slot in slots:
            slot.param.grad = None
        yield
        for parameter, grad, trainable in kept:
            parameter.grad = grad  # of the last local step, for whoever looks after it
            parameter.requires_grad_(trainable)


def _put_into_window(window: AccumulationWindow, so_far: Round) -> Tensor | float:
    """Let the round be what the reduction weighs: a rank that saw twice the tokens counts twice.

    Returns:
        What this rank's change is multiplied with; 1 exactly where nobody weighs.
    """
    if not so_far.micro_batches:
        return 1.0  # manual optimization: the plain mean over ranks
    window.weighted, window.micro_batches = True, so_far.micro_batches
    window.divisor = count = so_far.steps * window.divisor  # the same on all ranks
    window.weight = so_far.weight / window.reference
    window.loss = so_far.loss / window.reference
    return window.weight / count
