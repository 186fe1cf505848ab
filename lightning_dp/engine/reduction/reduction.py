"""One reduction: opened by a backward, launches buckets in order, ends, and returns what came of it.

[Note: launch order] Every rank issues the same collectives in the same order. The order is a function
of the agreed layout and of which parameters are trainable, never of which gradients arrived: a bucket
whose gradients are all here still waits for its predecessors.

[Note: late gradients] A parameter used in two re-entrant backwards fires twice. Those seen to do so are
sent last. If one fires again after its bucket left, ``.grad`` was taken away at launch, so nothing in
flight is touched; the fact travels in the control block and every rank raises.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.control import CONTROL_SIZE, Control, Reading
from lightning_dp.engine.plan.agreement import Profile, agree
from lightning_dp.engine.reduction import copies
from lightning_dp.engine.reduction.failure import bounded_wait
from lightning_dp.engine.reduction.finite import FiniteCheck
from lightning_dp.engine.reduction.norms import GradientNorms
from lightning_dp.engine.reduction.opening import Opening, raise_mismatch
from lightning_dp.engine.reduction.parts import Outcome, Parts
from lightning_dp.engine.reduction.sparse import reduce_sparse
from lightning_dp.engine.reduction.streams import gradient_streams
from lightning_dp.engine.reduction.timing import ReductionTimes, now
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.engine.wires.wire import InFlight
from lightning_dp.internals.autograd import graph_task_id

NEVER = 1 << 60


class Reduction:
    """The state of one reducing backward; made when it begins, dropped when it ends.

    Args:
        parts: What it works with.
        number: Counts reductions; slots remember in which they fired.
        task: Autograd's number of the outermost graph task.
        partitions: Only buckets of these partitions; ``None`` means all.
        known: What all ranks sent the last time; if it is something else now, ranks compare it first
            ([Note: buckets that meet by accident]).
        passed: What was trainable in earlier micro-batches of the window, and is sent though it may be
            frozen now; parameters without a place by name.
        check_finite: Look at local gradients before they are sent.
        norms: Takes norms of gradients, where they were asked for.
        zero_bad: Where they are not finite on some rank, and the host cannot know yet, empty them.
        times: Where to note when things happen.

    Attributes:
        sequence: Buckets in launch order; the last one carries the control block.
        arrivals: When gradients arrived, by slot; only in a reduction that is measured.
        waiting_for: The bucket whose collective the host waits for.
        is_opening: Whether the host waits for all ranks to have opened.
    """

    def __init__(
        self,
        parts: Parts,
        number: int,
        task: int,
        partitions: frozenset[int] | None = None,
        *,
        known: frozenset[int] | None = None,
        passed: frozenset[int | str] = frozenset(),
        check_finite: bool = False,
        norms: GradientNorms | None = None,
        zero_bad: bool = False,
        times: ReductionTimes | None = None,
    ) -> None:
        self.parts, self.number, self.task = parts, number, task
        self.partitions, self._passed = partitions, passed
        self.window = parts.window  # or as it was, where others follow before the end
        self._reads = parts.group.host_reads_are_free
        self.arrivals: dict[int, float] | None = None
        self.times = times or ReductionTimes()
        self.waiting_for: Bucket | None = None
        self.is_opening = self._has_sent = False
        self.launched = 0
        self.in_flight: list[tuple[Bucket, InFlight]] = []
        self._factor = parts.wire.predivide_factor
        self._streams = gradient_streams(parts.group.device)
        self._finite = FiniteCheck(self._factor) if check_finite else None
        self._norms = norms
        self._lookers = [each for each in (self._finite, norms) if each is not None]
        self._zero_bad = zero_bad
        self._is_sending = False  # an interrupt may come while it is not known what has left
        self._late: list[Slot] = []
        self._buffers: list[str] = []
        self._fired: dict[int, Slot] = {}  # without a bucket, in order of last arrival
        self._repeated, self._nested = set[int](), set[int]()
        self.live = parts.layout.live(partitions, passed)
        self.sequence, self._early = self._plan_launches()
        self._is_common = known in (None, self.live)
        agreed = self._reads and self._is_common
        self._opening = self._open() if (self.live or known) and not agreed else None

    def _plan_launches(self) -> tuple[list[Bucket], int]:
        """Return the buckets in launch order, and how many may leave before the backward ends."""
        live = [bucket for bucket in self.parts.layout.buckets if bucket.index in self.live]
        for bucket in live:
            bucket.ready = 0.0
            bucket.pending = [slot.param.requires_grad for slot in bucket.slots].count(True)
        live.sort(key=lambda bucket: bucket.deferred)
        early = sum(not bucket.deferred for bucket in live)
        if not self.parts.wire.carries_control:
            return live, early
        for position in reversed(range(len(live))):
            if live[position].carries_control:
                # The carrier leaves when the backward has ended and everything is known. It holds the
                # gradients that arrive last, so it would hardly leave sooner.
                early -= position < early
                live.append(live.pop(position))
                break
        return live, early

    def _open(self) -> Opening:
        window = self.parts.window
        return Opening(
            self.parts.group,
            window.step,
            sorted(self.live),
            window.weight,
            new=bool(self._unplanned()),
            stop=window.stop,
        )

    @property
    def opens(self) -> bool:
        """Whether ranks compare first what they are going to send."""
        return self._opening is not None

    # While the backward goes on

    def gradient_ready(self, slot: Slot) -> None:
        """One gradient has arrived. The hot path: called once per parameter and backward."""
        if self.arrivals is not None:
            self.arrivals[slot.index] = now()
        if self._streams is not None:
            self._streams.arrived()
        nested = graph_task_id() != self.task
        if slot.reduction == self.number:
            self._fired_again(slot)
            return
        slot.reduction = self.number
        bucket = slot.bucket
        if bucket is None:
            self._fired[slot.index] = slot
            if nested:
                self._nested.add(slot.index)
        elif nested and not slot.nested:
            bucket.pending = NEVER  # it may come again from the next inner backward
        else:
            if slot.copy_early:
                copies.copy_early(slot, self.number, self._factor)
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.ready = now()
                self._launch_ready()

    def _fired_again(self, slot: Slot) -> None:
        """Note a second gradient of one parameter in this backward."""
        bucket = slot.bucket
        if bucket is None:
            self._repeated.add(slot.index)
            self._fired[slot.index] = self._fired.pop(slot.index)
        elif any(bucket is sent for sent in self.sequence[: self.launched]):
            self._late.append(slot)

    def _launch_ready(self) -> None:
        """Send every bucket that is complete and whose predecessors have left ([Note: launch order])."""
        opening = self._opening
        if opening is not None and (not opening.is_completed() or opening.differs):
            return
        while self.launched < self._early and self.sequence[self.launched].pending <= 0:
            self._launch_next()

    def _launch_next(
        self, *, control: dict[int, float | Tensor] | None = None, empty: bool = False
    ) -> None:
        """Copy the next bucket's gradients in and start its collective.

        Args:
            control: What this rank has to say, if the bucket carries the control block.
            empty: Send zeros: this rank's backward has failed.

        Collective: every rank, in launch order. Does not block.
        """
        self._is_sending = True
        wire, bucket = self.parts.wire, self.sequence[self.launched]
        self.launched += 1
        with self._streams.joined() if self._streams is not None else nullcontext():
            copies.copy_in(bucket, self.number, self._factor, empty=empty)
            weight = self.parts.window.weight
            if isinstance(weight, Tensor):
                bucket.grads.masked_fill_(weight == 0, 0.0)  # a mean over nothing may be NaN
        for each in () if empty else self._lookers:
            each.look(bucket)
        if control is not None:
            self._write(bucket.control, control, self._factor)
        bucket.is_last = self.launched == len(self.sequence)
        launched = now()  # gloo's threads may run before the call returns
        work = wire.launch(bucket)
        self.in_flight.append((bucket, work))
        self._is_sending = False
        self.times.launched(bucket.index, wire.nbytes(bucket), bucket.ready, launched, work)

    def _write(self, block: Tensor, control: dict[int, float | Tensor], factor: float) -> None:
        """Write the control block, with what is only known when the last bucket has been filled."""
        for each in self._lookers:
            control.update(each.news(self.parts.window))
        self.parts.window.write(block, control, read=self._reads)
        if factor != 1.0:
            block.mul_(factor)

    # Its end

    def send(self) -> bool:
        """Send what has not left, and do not wait for it; :meth:`finish` does.

        Returns:
            Whether everything is under way. Otherwise ranks must plan buckets first: finish it at once.

        Collective: every rank, once. Blocks only if something changed since the last time on this rank.
        """
        parts = self.parts
        if parts.buffers is not None and parts.window.ends:
            self._buffers = parts.buffers.changed()
        self._new = self._unplanned()
        for each in self._lookers:
            each.look_sparse(parts.registry.slots)
        if not self._is_common:
            self._wait_for_opening()
        self._has_sent = True
        sends = self.sequence or (self._sparse() and not self._new)
        self._sent = self._send_rest(new=bool(self._new)) if sends else None
        return not self._new and not self._sparse()

    def keep_window(self) -> None:
        """Another window begins before this reduction ends: keep this one as it is. Local."""
        self.window = copy.copy(self.parts.window)

    def finish(self) -> Outcome:
        """Send what is left, wait, give gradients back.

        One round for the buckets that exist; rarely a second one, for parameters that have none yet.
        There is none after a control block with an error.

        Raises:
            ReplicaMismatchError: Ranks are in different backwards, or differ in what is trainable.
            RankFailedError: Another rank's backward raised before there were buckets.

        Collective: every rank, once. Blocks (on CUDA: the stream only).
        """
        parts = self.parts
        outcome = Outcome(finite=self._finite)
        if not parts.group.reduces:
            outcome.control = self._finish_alone()
            return outcome
        self._wait_for_opening()
        if not self._has_sent:
            self.send()
        outcome.buffers = self._buffers
        if self._sent is not None:
            outcome.control = self._receive(*self._sent)
        if self._needs_second_round(outcome.control, self._new):
            outcome.agreement = agree(self._profile(self._new), parts.group, parts.registry.names)
            self.sequence = parts.layout.extend(outcome.agreement, parts.registry.slots)
            outcome.new_buckets = self.sequence
            self.launched = 0
            later = self._receive(*self._send_rest(new=False))
            outcome.control = later if outcome.control is None else outcome.control
        sparse = self._sparse()
        if outcome.control is not None and sparse and not outcome.control.has_error():
            reduce_sparse(sparse, parts.group)
            self._scale_all([slot.param.grad for slot in sparse], self._scale_of(outcome.control))
        outcome.late = [slot.name for slot in self._late]
        outcome.stop = self._opening is not None and self._opening.stop
        return outcome

    def _finish_alone(self) -> Reading:
        """World of one: nothing to send; only the window's weight is left to divide by."""
        block = torch.zeros(CONTROL_SIZE, dtype=torch.float64, device=self.parts.group.device)
        window = self.parts.window
        news = self._norms.news(window) if self._norms is not None else None
        window.write(block, news, read=self._reads)
        self._scale_all(
            [slot.param.grad for slot in self.parts.registry.slots], window.own_factor()
        )
        return Reading(block, at_once=self._reads)

    def _scale_all(self, grads: Sequence[Tensor | None], factor: Tensor | float) -> None:
        """Scale gradients that are in no bucket."""
        copies.scale(grads, factor)
        if self._norms is not None:
            self._norms.look_averaged((), grads)

    def _wait_for_opening(self) -> None:
        opening = self._opening
        if opening is None:
            return
        self.is_opening = True
        opening.wait()
        self.is_opening = False
        if opening.differs:
            frozen = [
                slot.name
                for bucket in self.parts.layout.buckets
                for slot in bucket.slots
                if not slot.param.requires_grad and not slot.removed
            ]
            raise_mismatch(self.parts.group, self.parts.window.step, frozen)

    def _unplanned(self) -> list[Slot]:
        return [slot for slot in self.parts.registry.unplanned() if self._takes_part(slot)]

    def _sparse(self) -> list[Slot]:
        """Slots with sparse gradients that take part, those of a moment ago too."""
        sparse = self.parts.layout.sparse
        return [slot for slot in sparse if ~slot.index in self.live or self._takes_part(slot)]

    def _takes_part(self, slot: Slot) -> bool:
        trained = slot.param.requires_grad or slot.name in self._passed
        return trained and (self.partitions is None or slot.partition in self.partitions)

    def _needs_second_round(self, control: Reading | None, unplanned: list[Slot]) -> bool:
        """Whether some rank has parameters without a bucket, and no rank has failed."""
        if control is None:
            return bool(unplanned)
        if self._reads:
            new = control.means()[Control.NEW] > 0
        else:
            new = self._opening.new if self._opening is not None else bool(unplanned)
        return new and not control.has_error()

    def _profile(self, unplanned: Sequence[Slot], error: str | None = None) -> Profile:
        # Outside of a backward nothing fired: what has a gradient then stands for the order of arrival.
        present = [slot for slot in reversed(unplanned) if slot.param.grad is not None]
        fired = [slot for slot in self._fired.values() if not slot.planned] or present
        return Profile(
            trainable=[slot.index for slot in unplanned],
            fired=[slot.index for slot in fired],
            repeated=sorted(self._repeated),
            nested=sorted(self._nested),
            sparse=[
                slot.index
                for slot in unplanned
                if (slot.expects_sparse if slot.param.grad is None else slot.param.grad.is_sparse)
            ],
            error=error,
        )

    def _receive(self, message: Tensor | None, work: InFlight | None) -> Reading:
        """Wait for what :meth:`_send_rest` sent, give gradients back; return the reduced control block.

        Collective: completes what every rank has started. Blocks (on CUDA: the stream only).
        """
        for bucket, _ in self.in_flight:
            copies.copy_out_used(bucket)  # in the shadow of the collectives
        control = Reading(self._wait(message, work), at_once=self._reads)
        buckets = [bucket for bucket, _ in self.in_flight]
        factor = self._scale_of(control)
        for bucket in buckets:
            if bucket.sliced and not self.parts.wire.gathers:
                bucket.keep_slice(self.parts.group.rank)
            copies.scale([bucket.grads], factor)
            if self._zero_bad:
                bucket.grads.masked_fill_(control.block[Control.NON_FINITE] > 0, 0.0)
        if self._norms is not None:
            self._norms.look_averaged(buckets)
        copies.copy_out_rest(buckets)
        self.in_flight = []
        return control

    def _send_rest(
        self, *, new: bool, error: bool = False
    ) -> tuple[Tensor | None, InFlight | None]:
        """Launch what has not left, the control block with the last bucket or behind it.

        Returns:
            Where no bucket carries it: the message with the control block, and its collective.

        Collective: every rank. One a bucket, and a small one only where no bucket can carry the control
        block (all-half-precision models, communication hooks). Does not block.
        """
        group, wire = self.parts.group, self.parts.wire
        control = self._news(new=new, error=error)
        last = len(self.sequence) - 1
        carried = last >= 0 and wire.carries_control and self.sequence[last].carries_control
        while self.launched <= last:
            mine = control if carried and self.launched == last else None
            self._launch_next(control=mine, empty=error)
        if carried:
            return None, None
        # As exact as the gradients: the division by the sum of weights would cost a double its digits.
        doubles = any(bucket.dtype == torch.float64 for bucket in self.sequence)
        dtype = torch.float64 if doubles else torch.float32
        block = torch.zeros(CONTROL_SIZE, dtype=dtype, device=group.device)
        self._write(block, control, 1.0)
        flags = [] if wire.carries_control else [b.flags.to(dtype) for b, _ in self.in_flight]
        message = torch.cat([block, *flags])
        self._is_sending = True  # and is not sent twice
        op = dist.ReduceOp.AVG
        return message, dist.all_reduce(message, op=op, group=group.apart, async_op=True)

    def _news(self, *, new: bool, error: bool) -> dict[int, float | Tensor]:
        backward_s, buffers = now() - self.times.begin, self.parts.buffers
        return {
            Control.BACKWARD_S: backward_s,
            Control.BACKWARD_S2: backward_s**2,
            Control.LATE: len(self._late),
            Control.NEW: new,
            Control.BUFFERS: len(self._buffers)
            or (buffers.sampled_difference() if buffers else 0.0),
            Control.ERROR: error,
            Control.FAILED_RANK: self.parts.group.rank + 1 if error else 0,
        }

    def _wait(self, message: Tensor | None, work: InFlight | None) -> Tensor:
        """Wait for every collective; return the reduced control block."""
        on_host = self.parts.group.waits_on_host
        self.times.waits(self.parts.group.device)
        for position, (bucket, sent) in enumerate(self.in_flight):
            self.waiting_for = bucket
            interruptible_wait(sent, on_host=on_host)
            self.times.waited(position - len(self.in_flight), sent)
        if work is not None:
            interruptible_wait(work, on_host=on_host)
        self.waiting_for = None
        self.times.ends()
        if message is None:
            return self.sequence[-1].control
        offset = CONTROL_SIZE
        if message.numel() > CONTROL_SIZE:
            for bucket, _ in self.in_flight:
                bucket.flags.copy_(message[offset : offset + len(bucket.slots)])
                offset += len(bucket.slots)
        return message[:CONTROL_SIZE]

    def _scale_of(self, control: Reading) -> Tensor | float:
        """What a mean over ranks must be multiplied with to be the window's weighted mean."""
        mean: float | Tensor | None = None
        if self._reads:
            mean = control.means()[Control.WEIGHT]
        elif self._opening is not None:
            mean = self._opening.mean_weight
        if mean is None:
            mean = control.block[Control.WEIGHT]
        return self.window.factor(mean, control.block.dtype)

    # Its end, when this rank has failed

    def give_up(self, error: BaseException) -> None:
        """Complete what the others wait for, with an error ([Note: who sends what]). Never raises.

        Collective: completes those of the reduction. Waits a few seconds at most.
        """
        try:
            works = self._complete(error)
            done = bounded_wait(works)
        except Exception:  # whatever it is, the error of this rank is the one that matters
            done = False
        if not done:
            self.abandon()
        copies.clear(self.parts.registry.slots)

    def abandon(self) -> None:
        """Wait for nothing: what ends later must not write into a later step's gradients. Local."""
        for bucket, _ in self.in_flight:
            bucket.abandon()

    def _complete(self, error: BaseException) -> list[Any]:
        """Send zeros and the error; return the collectives that are under way."""
        opening = self._opening
        if opening is not None and not opening.is_completed():
            if not bounded_wait([opening]):
                raise error
            opening.wait()
        if self._is_sending or (opening is not None and opening.differs):
            raise error
        unplanned = self._unplanned()
        if not self.sequence and unplanned:
            self.parts.group.all_gather_object(self._profile(unplanned, error=repr(error)))
            return []
        _, work = self._send_rest(new=False, error=True)
        return [*(sent for _, sent in self.in_flight), *([work] if work is not None else ())]
