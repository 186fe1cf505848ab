"""Few meetings: each rank steps alone, and every so often all agree on one model again.

    anchor ──copy──> local steps of the user's own optimizer (no collective) ──> meeting
       ^                                                                            │
       └── outer SGD on the mean over ranks of (anchor - local weights) <───────────┘

With ``lr`` 1 and no momentum the meeting averages the weights: local SGD. With Nesterov momentum it is
DiLoCo.

[Note: streaming] The model may be cut into fragments that take turns: fragment ``i`` of ``n`` is sent
when ``i * every // n`` steps of a round are done, and applied ``delay`` steps later, which hide the
sending. One is under way at a time. A weight then becomes ``mix * local + (1 - mix) * anchor``: what the
rank did since sending is thrown away, or kept in part. Anchors change at the same step on all ranks and are
always equal; all weights are equal only when training ends, with a meeting of every fragment.

[Note: two sets of weights] In mid-round the ranks' weights differ on purpose. Whoever looks at the module
from outside (a validation, a checkpoint) is shown a copy of the anchors. A copy: a callback that writes
to the module meanwhile (its own weights, put back after a validation) reaches neither the anchor nor what
this rank trains.

Source: Stich, Local SGD (arXiv 1805.09767); Lin et al., post-local SGD (1808.07217); Douillard et al.,
DiLoCo (2311.08105) and Streaming DiLoCo (2501.18512).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.plan.registry import named_buffers
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.options import EngineOptions
from lightning_dp.step.fragments import Fragments
from lightning_dp.step.outer_checks import LR, MOMENTUM
from lightning_dp.step.outer_meeting import Anchor, Meeting, Round
from lightning_dp.step.outer_state import to_cpu, weighted_mean

log = logging.getLogger(__name__)


class Outer:
    """Decides when ranks meet, and owns the anchor and the outer optimizer.

    Args:
        options: With ``outer``.
        module: The user's.
        reducer: Averages the differences.
        keeper: Makes buffers equal at a meeting.
        fragments: Which parameters meet together.

    Attributes:
        steps: The user's optimizer steps so far, those that reduced gradients too.
        position: Those since the round began.
        mid_round: Whether this rank may have another model than the others now.
    """

    def __init__(
        self,
        options: EngineOptions,
        module: nn.Module,
        reducer: Reducer,
        keeper: BufferKeeper,
        fragments: Fragments,
    ) -> None:
        assert options.outer is not None
        sgd = options.outer.get("optimizer", {})
        self._every = int(options.outer["every"])
        self._start_after = int(options.outer.get("start_after", 0))
        self._delay = int(options.outer.get("delay", 0))
        self._mix = float(options.outer.get("mix", 0.0))
        self._lr = float(sgd.get("lr", LR))
        self._momentum = float(sgd.get("momentum", MOMENTUM))
        self._nesterov = bool(sgd.get("nesterov", self._momentum > 0))
        self._module = module
        self._reducer = reducer
        self._keeper = keeper
        self._window = reducer.window
        self._fragments = fragments
        self._anchors: dict[int, Anchor] = {}  # by number of slot
        self._buffers: dict[str, Tensor] = {}  # at the last meeting
        self._hidden: list[tuple[Tensor, Tensor]] = []  # local values, while the anchor is shown
        self._rounds = self._new_rounds()  # by fragment
        self._meeting: Meeting | None = None
        self._last_window = Round()
        self._stepped = False
        self.mid_round = False
        self.steps = self.position = 0

    def _new_rounds(self) -> list[Round]:
        return [Round() for _ in range(self._fragments.count)]

    @property
    def streams(self) -> bool:
        """Whether some local steps go on while a meeting does, or between two fragments' meetings."""
        return self._fragments.count > 1 or self._delay > 0 or self._mix > 0

    # Local steps

    def before_step(self) -> None:
        """Keep the values of what is going to be stepped for the first time. Local."""
        if not self._window.is_local:
            return
        self._reducer.poll()
        self._keeper.note_forward()
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
        """Count one step, of however many optimizers; meet if it is time, or training ends with it.

        Collective: every rank, at the same step.
        """
        if not self._stepped:
            return
        self._stepped = False
        self.steps += 1
        if not self._window.is_local:
            if self.steps >= self._start_after:
                self._window.is_local = True
                self._meet_buffers()
            return
        self.position = (self.position + 1) % self._every
        for so_far in self._rounds:
            so_far.add(self._last_window)
        if self._meeting is not None:
            self._meeting.left -= 1
            self._apply_if_due()
        count = self._fragments.count
        for fragment in range(count):
            if self.position == fragment * self._every // count:
                self._send(fragment)
                self._apply_if_due()
        if is_last:
            self.finish_round()

    # The meeting

    def _send(self, fragment: int, delay: int | None = None) -> None:
        """Send what a fragment changed. Collective: every rank, at the same step."""
        so_far, self._rounds[fragment] = self._rounds[fragment], Round()
        left = self._delay if delay is None else delay
        self._meeting = Meeting(fragment, left, self._fragments.of_fragment(fragment))
        changed = [each for each in self._anchored() if self._fragment_of(each[0]) == fragment]
        self._meeting.send(self._reducer, changed, so_far)

    def _apply_if_due(self) -> None:
        meeting = self._meeting
        if meeting is not None and meeting.left <= 0:
            self._apply(meeting)

    @torch.no_grad()
    def _apply(self, meeting: Meeting) -> None:
        """Step from the anchor along the ranks' mean change. Collective: every rank, at the same step."""
        means = meeting.arrive(self._reducer)
        self._meeting = None
        for slot, anchor in self._anchored():
            if slot.name in means:
                self._step(anchor, means[slot.name])
                _move(slot.param, anchor.value, self._mix)
        self.mid_round = bool(self._mix) or any(so_far.steps for so_far in self._rounds)
        if meeting.fragment == 0:
            self._meet_buffers()

    @torch.no_grad()
    def finish_round(self) -> None:
        """Let all fragments meet; all replicas are equal then.

        Raises: as :meth:`Reducer.finalize`.

        Collective: every rank, at the same step; nothing without steps. Blocks, the host too.
        """
        if self._meeting is not None:
            self._apply(self._meeting)
        for fragment, so_far in enumerate(self._rounds):
            if so_far.steps:
                self._send(fragment, delay=0)
                self._apply_if_due()
        if self.streams and self.mid_round:
            for slot, anchor in self._anchored():
                slot.param.copy_(anchor.value)
            self._meet_buffers()
        self.position, self.mid_round = 0, False

    def _fragment_of(self, slot: Slot) -> int:
        return self._fragments.of(slot.partition)

    def _anchored(self) -> Iterator[tuple[Slot, Anchor]]:
        for slot in self._reducer.registry.slots:
            if slot.index in self._anchors and not slot.removed:
                yield slot, self._anchors[slot.index]

    def _step(self, anchor: Anchor, mean: Tensor) -> None:
        """SGD as ``torch.optim.SGD``, with the mean change as the gradient."""
        if self._momentum:
            before = anchor.momentum
            momentum = mean.clone() if before is None else before.mul_(self._momentum).add_(mean)
            anchor.momentum = momentum
            mean = mean.add(momentum, alpha=self._momentum) if self._nesterov else momentum
        anchor.value.sub_(mean, alpha=self._lr)

    def _meet_buffers(self) -> None:
        """Make buffers equal. Collective: every rank."""
        self._keeper.before_use(between_steps=True)
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        self._buffers = {name: each.clone() for name, each in named_buffers(self._module).items()}

    # What others see in mid-round ([Note: two sets of weights])

    def show_anchor(self, *, copy: bool = True) -> bool:
        """Let the module hold what all ranks last agreed on; return whether it did not yet. Local.

        Args:
            copy: What is written to the module then is lost.
        """
        if not self.mid_round or self._hidden:
            return False
        shown: list[tuple[Tensor, Tensor]] = [(s.param, a.value) for s, a in self._anchored()]
        buffers = named_buffers(self._module)
        shown += [(buffers[name], kept) for name, kept in self._buffers.items() if name in buffers]
        for tensor, value in shown:
            self._hidden.append((tensor, tensor.data))
            tensor.data = value.clone() if copy else value
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

        Collective: every rank, unless ``alone``. Blocks; waits for what is under way, which is saved;
        sends a rank's optimizer state, in mid-round its weights too. Rank 0 then holds all of them.
        """
        group = self._reducer.group
        momentum = {s.name: a.momentum for s, a in self._anchored() if a.momentum is not None}
        entry: dict[str, Any] = {
            "format": 1,
            "steps": self.steps,
            "position": 0 if alone else self.position,
            "world_size": group.world_size,
            "momentum": to_cpu(momentum),
            "fragments": self._fragments.state(),
            "ranks": [],
        }
        meeting = None if alone else self._meeting
        if meeting is not None:
            means = to_cpu(meeting.arrive(self._reducer))
            entry["meeting"] = {"fragment": meeting.fragment, "left": meeting.left, "means": means}
        if self._window.is_local and not alone:
            own = {key: checkpoint[key] for key in by_rank if key in checkpoint and group.rank}
            mine = {"own": own, **self._local_state()}
            entry["ranks"] = group.gather_object(mine, "what each rank saves")
        checkpoint.setdefault("lean_ddp", {})["outer"] = entry

    def _local_state(self) -> dict[str, Any]:
        if not self.mid_round:
            return {}
        shown = bool(self._hidden)
        self.show_local()
        buffers = named_buffers(self._module)
        state = {
            "weights": to_cpu({slot.name: slot.param for slot, _ in self._anchored()}),
            "buffers": to_cpu({name: buffers[name] for name in self._buffers if name in buffers}),
            "rounds": [
                [float(each.weight), each.micro_batches, float(each.loss), each.steps]
                for each in self._rounds
            ],
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
        self._rounds, self._meeting, self._stepped = self._new_rounds(), None, False
        self.position = 0
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
        then = saved["world_size"], saved["fragments"]["count"]
        if then == (group.world_size, self._fragments.count):
            self._fragments.restore(saved["fragments"])
            self._reducer.registry.look_again()
            if parts and "weights" in parts[group.rank]:
                self._restore_local(parts[group.rank], saved)
            return
        if parts and "weights" in parts[0]:
            self._finish_for(parts, saved)
        if parts and group.rank == 0:
            log.warning(
                "lean_ddp: the checkpoint was saved by %d rank(s) with %d fragment(s) in step %d of a"
                " round: it is finished with their mean, and the optimizers of %d rank(s) go on from %s.",
                *then,
                saved["position"],
                group.world_size,
                "their own state" if then[0] == group.world_size else "rank 0's state",
            )

    def _restore_local(self, part: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        self.position, self.mid_round = saved["position"], True
        self._rounds = [Round(*numbers) for numbers in part["rounds"]]
        for slot, _ in self._anchored():
            if slot.name in part["weights"]:
                slot.param.copy_(part["weights"][slot.name])
        for name, buffer in named_buffers(self._module).items():
            if name in part["buffers"]:
                buffer.copy_(part["buffers"][name])
        if "meeting" in saved:
            kept = saved["meeting"]
            device = self._reducer.group.device
            self._meeting = Meeting(
                kept["fragment"],
                kept["left"],
                self._fragments.of_fragment(kept["fragment"]),
                {name: mean.to(device) for name, mean in kept["means"].items()},
            )

    def _finish_for(self, parts: list[Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
        """Finish the round of ranks that are no longer there, or of other fragments."""
        under_way = saved.get("meeting", {"means": {}})["means"]
        for slot, anchor in self._anchored():
            local = [part["weights"][slot.name] for part in parts if slot.name in part["weights"]]
            if len(local) < len(parts):
                continue
            if slot.name in under_way:
                self._step(anchor, under_way[slot.name].to(anchor.value))
                for each in local:
                    _move(each, anchor.value.to(each), self._mix)
            rounds = [part["rounds"][saved["fragments"]["of"].get(slot.name, 0)] for part in parts]
            if rounds[0][-1]:
                mean = weighted_mean(local, [weight for weight, *_ in rounds])
                self._step(anchor, anchor.value - mean.to(anchor.value))
            slot.param.copy_(anchor.value)


def _move(local: Tensor, anchor: Tensor, mix: float) -> None:
    """Let ``local`` be the anchor; with ``mix``, keep that share of what it was."""
    if mix:
        local.mul_(mix).add_(anchor, alpha=1 - mix)
    else:
        local.copy_(anchor)
