"""Few meetings: each rank steps alone, and every so often all agree on one model again.

    anchor ──copy──> local steps of the user's own optimizer (no collective) ──> meeting
       ^                                                                            │
       └── outer SGD on the mean over ranks of (anchor - local weights) <───────────┘

With ``lr`` 1 and no momentum the meeting averages the weights: local SGD. With Nesterov momentum it is
DiLoCo.

A meeting is a reduction without a backward: the differences stand in ``.grad`` for its time, so that what
holds for gradients (any type, any wire, weights, errors, signs of the step) holds for them.

[Note: two sets of weights] In mid-round the ranks' weights differ on purpose. Whoever looks at the module
from outside (a validation, a checkpoint) is shown a copy of the last meeting's, which are equal. A copy: a
callback that writes to the module meanwhile (its own weights, put back after a validation) reaches neither
the anchor nor what this rank trains.

Source: Stich, Local SGD (arXiv 1805.09767); Lin et al., post-local SGD (1808.07217); Douillard et al.,
DiLoCo (2311.08105).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.plan.registry import buffer_owners
from lightning_dp.engine.reduction import copies
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.options import EngineOptions
from lightning_dp.step.outer_checks import LR, MOMENTUM
from lightning_dp.step.outer_state import gather, to_cpu, weighted_mean

log = logging.getLogger(__name__)


@dataclass
class Anchor:
    """One parameter at the last meeting, and what the outer optimizer keeps of it."""

    value: Tensor
    momentum: Tensor | None = None


@dataclass
class Round:
    """What this rank's local steps counted since the last meeting, as in an accumulation window."""

    weight: Tensor | float = 0.0
    micro_batches: int = 0
    loss: Tensor | float = 0.0

    def add(self, window: Round) -> None:
        """Count one step's window; a closure that ran many times is one."""
        self.weight = self.weight + window.weight
        self.micro_batches += window.micro_batches
        self.loss = self.loss + window.loss


class Outer:
    """Decides when ranks meet, and owns the anchor and the outer optimizer.

    Args:
        options: With ``outer``.
        module: The user's.
        reducer: Averages the differences.
        keeper: Makes buffers equal at a meeting.

    Attributes:
        steps: The user's optimizer steps so far, those that reduced gradients too.
        position: Those since the last meeting.
        mid_round: Whether this rank may have another model than the others now.
    """

    def __init__(
        self,
        options: EngineOptions,
        module: nn.Module,
        reducer: Reducer,
        keeper: BufferKeeper,
    ) -> None:
        assert options.outer is not None
        sgd = options.outer.get("optimizer", {})
        self._every = int(options.outer["every"])
        self._start_after = int(options.outer.get("start_after", 0))
        self._lr = float(sgd.get("lr", LR))
        self._momentum = float(sgd.get("momentum", MOMENTUM))
        self._nesterov = bool(sgd.get("nesterov", self._momentum > 0))
        self._module = module
        self._reducer = reducer
        self._keeper = keeper
        self._window = reducer.window
        self._anchors: dict[int, Anchor] = {}  # by number of slot
        self._buffers: dict[str, Tensor] = {}  # at the last meeting
        self._hidden: list[tuple[Tensor, Tensor]] = []  # local values, while the anchor is shown
        self._round, self._last_window = Round(), Round()
        self._stepped = False
        self.mid_round = False
        self.steps = self.position = 0

    # Local steps

    def before_step(self) -> None:
        """Keep the values of what is going to be stepped for the first time. Local."""
        if not self._window.is_local:
            return
        self.mid_round = True
        for slot in self._reducer.registry.slots:
            if slot.removed:
                self._anchors.pop(slot.index, None)
            elif slot.param.requires_grad and slot.index not in self._anchors:
                self._anchors[slot.index] = Anchor(slot.param.detach().clone())

    def end_window(self) -> None:
        """A local step's last backward has ended: this rank's own weighted mean is the gradient."""
        window = self._window
        if window.weighted:  # the reference may change in the round
            self._last_window = Round(
                window.weight * window.reference,
                window.micro_batches,
                window.loss * window.reference,
            )
        self._reducer.end_alone()

    def note_step(self) -> None:
        """An optimizer stepped, or a gradient scaler decided that it must not: all ranks count attempts."""
        self._stepped = True

    def end_step(self, *, is_last: bool) -> None:
        """Count one step, of however many optimizers; meet if the round is full, or training ends with it.

        Collective: every rank, at the same step.
        """
        if not self._stepped:
            return
        self._stepped = False
        self.steps += 1
        if self._window.is_local:
            self.position += 1
            self._round.add(self._last_window)
            if is_last or self.position >= self._every:
                self.finish_round()
        elif self.steps >= self._start_after:
            self._window.is_local = True
            self._begin_round()

    # The meeting

    @torch.no_grad()
    def finish_round(self) -> None:
        """Step from the anchor along the ranks' mean change; all replicas are equal then.

        Raises: as :meth:`Reducer.finalize`.

        Collective: every rank, at the same step; nothing without steps. Blocks, the host too.
        """
        if self.position == 0:
            return
        slots = [slot for slot in self._reducer.registry.slots if not slot.removed]
        kept = [(slot.param, slot.param.grad, slot.param.requires_grad) for slot in slots]
        for slot in slots:
            slot.param.grad = None
        share = self._put_round_into_window()
        for slot, anchor in self._anchored():
            slot.param.requires_grad_(True)  # what was frozen in the round has changed too
            slot.param.grad = anchor.value - slot.param
        copies.scale((slot.param.grad for slot, _ in self._anchored()), share)
        self._reducer.reduce_now()
        self._reducer.settle()
        for slot, anchor in self._anchored():
            mean = slot.param.grad
            assert mean is not None
            self._step(slot, anchor, mean.to_dense() if mean.is_sparse else mean)
        for parameter, grad, trainable in kept:
            parameter.grad = grad  # of the last local step, for whoever looks after it
            parameter.requires_grad_(trainable)
        self._begin_round()

    def _anchored(self) -> Iterator[tuple[Slot, Anchor]]:
        for slot in self._reducer.registry.slots:
            if slot.index in self._anchors and not slot.removed:
                yield slot, self._anchors[slot.index]

    def _put_round_into_window(self) -> Tensor | float:
        """Let the round be what the reduction weighs: a rank that saw twice the tokens counts twice.

        Returns:
            What this rank's change is multiplied with; 1 exactly where nobody weighs.
        """
        window, so_far = self._window, self._round
        if not so_far.micro_batches:
            return 1.0  # manual optimization: the plain mean over ranks
        window.weighted, window.micro_batches = True, so_far.micro_batches
        window.divisor = count = self.position * window.divisor  # the same on all ranks
        window.weight = so_far.weight / window.reference
        window.loss = so_far.loss / window.reference
        return window.weight / count

    def _step(self, slot: Slot, anchor: Anchor, mean: Tensor) -> None:
        """SGD as ``torch.optim.SGD``, with the mean change as the gradient."""
        if self._momentum:
            before = anchor.momentum
            momentum = mean.clone() if before is None else before.mul_(self._momentum).add_(mean)
            anchor.momentum = momentum
            mean = mean.add(momentum, alpha=self._momentum) if self._nesterov else momentum
        anchor.value.sub_(mean, alpha=self._lr)
        slot.param.copy_(anchor.value)

    def _begin_round(self) -> None:
        """Make buffers equal. Collective: every rank."""
        self._keeper.before_use(between_steps=True)
        self.position, self._round, self.mid_round = 0, Round(), False
        self._keep_buffers()

    def _named_buffers(self) -> dict[str, Tensor]:
        owners = buffer_owners(self._module).items()
        return {name: owner.get_buffer(key) for name, (owner, key) in owners}

    def _keep_buffers(self) -> None:
        self._buffers = {name: buffer.clone() for name, buffer in self._named_buffers().items()}

    # What others see in mid-round ([Note: two sets of weights])

    def show_anchor(self) -> bool:
        """Let the module hold what it held at the last meeting; return whether it did not yet. Local."""
        if not self.mid_round or self._hidden:
            return False
        shown: list[tuple[Tensor, Tensor]] = [(s.param, a.value) for s, a in self._anchored()]
        buffers = self._named_buffers()
        shown += [(buffers[name], kept) for name, kept in self._buffers.items() if name in buffers]
        for tensor, value in shown:
            self._hidden.append((tensor, tensor.data))
            tensor.data = value.clone()
        return True

    def show_local(self) -> None:
        """Let the module hold this rank's own weights again. Local."""
        hidden, self._hidden = self._hidden, []
        for tensor, local in hidden:
            tensor.data = local

    # Checkpoints

    def add_to(self, checkpoint: dict[str, Any], by_rank: tuple[str, ...], *, alone: bool) -> None:
        """Add the outer optimizer's state, and what is each rank's own.

        Args:
            checkpoint: About to be written; in mid-round its ``state_dict`` is the anchor's.
            by_rank: Keys of what may differ between ranks.
            alone: The others may be gone: without what is theirs, so that the round is lost on resume.

        Collective: every rank, unless ``alone``. Blocks; sends a rank's optimizer state, in mid-round its
        weights too. Rank 0 then holds all of them.
        """
        group = self._reducer.group
        entry: dict[str, Any] = {
            "format": 1,
            "steps": self.steps,
            "position": 0 if alone else self.position,
            "world_size": group.world_size,
            "momentum": {
                slot.name: to_cpu(anchor.momentum)
                for slot, anchor in self._anchored()
                if anchor.momentum is not None
            },
            "ranks": [],
        }
        if self._window.is_local and not alone:
            own = {key: checkpoint[key] for key in by_rank if key in checkpoint and group.rank}
            entry["ranks"] = gather({"own": own, **self._local_state()}, group)
        checkpoint.setdefault("lean_ddp", {})["outer"] = entry

    def _local_state(self) -> dict[str, Any]:
        if not self.mid_round:
            return {}
        shown = bool(self._hidden)
        self.show_local()
        buffers, numbers = self._named_buffers(), self._round
        state = {
            "weights": to_cpu({slot.name: slot.param for slot, _ in self._anchored()}),
            "buffers": to_cpu({name: buffers[name] for name in self._buffers if name in buffers}),
            "round": [float(numbers.weight), numbers.micro_batches, float(numbers.loss)],
        }
        if shown:
            self.show_anchor()
        return state

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None, steps: int) -> None:
        """Begin to train, or go on where a checkpoint was saved. Local; every rank calls it.

        Args:
            saved: Of :meth:`add_to`; ``None`` without one.
            steps: The user's optimizer steps so far, as the Trainer counts them.
        """
        self._anchors.clear()  # of a search for a learning rate
        self.position, self._round, self._stepped = 0, Round(), False
        self.steps = int(saved["steps"]) if saved is not None else steps
        self._window.is_local = self.steps >= self._start_after
        self.before_step()
        self.mid_round = False
        self._keep_buffers()
        if saved is None:
            return
        for slot, anchor in self._anchored():
            if slot.name in saved["momentum"]:
                anchor.momentum = saved["momentum"][slot.name].to(anchor.value, copy=True)
        group, parts = self._reducer.group, saved["ranks"]
        if saved["world_size"] == group.world_size:
            if parts and "weights" in parts[group.rank]:
                self._restore_local(parts[group.rank], saved["position"])
            return
        if saved["position"]:
            self._finish_for(parts)
        if parts and group.rank == 0:
            log.warning(
                "lean_ddp: the checkpoint was saved by %d rank(s) in step %d of a round: the round is"
                " finished with their mean, and the optimizers of %d rank(s) go on from rank 0's state.",
                saved["world_size"],
                saved["position"],
                group.world_size,
            )

    def _restore_local(self, part: Mapping[str, Any], position: int) -> None:
        self.position, self.mid_round = position, True
        weight, micro_batches, loss = part["round"]
        self._round = Round(weight, int(micro_batches), loss)
        for slot, _ in self._anchored():
            if slot.name in part["weights"]:
                slot.param.copy_(part["weights"][slot.name])
        for name, buffer in self._named_buffers().items():
            if name in part["buffers"]:
                buffer.copy_(part["buffers"][name])

    def _finish_for(self, parts: list[Mapping[str, Any]]) -> None:
        """Finish the round of ranks that are no longer there."""
        weights = [part["round"][0] for part in parts]
        for slot, anchor in self._anchored():
            local = [part["weights"][slot.name] for part in parts if slot.name in part["weights"]]
            if len(local) == len(parts):
                mean = weighted_mean(local, weights).to(anchor.value)
                self._step(slot, anchor, anchor.value - mean)
