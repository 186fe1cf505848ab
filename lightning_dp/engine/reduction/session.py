"""One reducing backward: which buckets leave, in which order, and how their results come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.reduction.timing import SessionTimes, now
from lightning_dp.engine.reduction.window import Control
from lightning_dp.engine.wires.wire import InFlight

if TYPE_CHECKING:
    from lightning_dp.engine.reduction.reducer import Reducer

GIVE_UP_S = 5.0
NEVER = 1 << 60


class Session:
    """The state of one reducing backward; made when it begins, dropped when it ends.

    Attributes:
        number: Counts sessions; slots remember in which they fired.
        task: Autograd's number of the outermost graph task.
        sequence: Buckets in launch order; the last one carries the control tail.
        touched: Slots whose local gradient was kept, because the bucket has another dtype.
    """

    def __init__(
        self, reducer: Reducer, number: int, task: int, partition: int | None = None
    ) -> None:
        self.number = number
        self.task = task
        self.arrivals: dict[int, float] | None = (
            None  # by slot, in the one session that is measured
        )
        self.times = SessionTimes(exact=reducer.exact_times)
        self.share = reducer.wire.share
        self.partition = partition  # None: all
        self.sequence, self.early = _sequence(reducer, partition)
        self.launched = 0
        self.in_flight: list[tuple[Bucket, InFlight]] = []
        self.touched: list[Slot] = []
        self.late: list[Slot] = []
        self.non_finite: list[str] = []
        self.buffers: list[str] = []
        self.squared_norm = 0.0
        self.fired: dict[int, Slot] = {}  # without a bucket, in order of last arrival
        self.repeated: set[int] = set()
        self.nested: set[int] = set()
        self.waiting_for: Bucket | None = None
        self.before_last: Callable[[], None] | None = None

    # While the backward goes on

    def fired_unplanned(self, slot: Slot, nested: bool) -> None:
        """Note the arrival of a gradient that has no bucket yet."""
        self.fired[slot.index] = slot
        if nested:
            self.nested.add(slot.index)

    def fired_again(self, slot: Slot) -> None:
        """Note a second gradient of one parameter in this backward."""
        bucket = slot.bucket
        if bucket is None:
            self.repeated.add(slot.index)
            self.fired[slot.index] = self.fired.pop(slot.index)
        elif any(bucket is sent for sent in self.sequence[: self.launched]):
            self.late.append(slot)

    def take(self, slot: Slot) -> None:
        """Copy one large gradient into its bucket now, while the processor's cache still holds it.

        One copy a parameter costs a call each; for large ones on a CPU, fetching them from memory again
        when the bucket leaves costs more. The memory that it frees is warm for the next layer's.
        """
        grad = slot.param.grad
        if grad is None or grad is slot.grad_view or grad.is_sparse:
            return
        bucket = slot.bucket
        assert bucket is not None
        bucket.allocate()
        assert slot.view is not None
        with torch.no_grad():
            if self.share == 1.0:
                slot.view.copy_(grad)
            else:
                torch.mul(grad, self.share, out=slot.view)
        slot.param.grad = None
        slot.taken = self.number

    def hold(self, bucket: Bucket) -> None:
        """Do not send ``bucket`` before the backward has ended."""
        bucket.pending = NEVER

    def launch_ready(self, reducer: Reducer) -> None:
        """Send every bucket that is complete and whose predecessors have left ([Note: launch order])."""
        while self.launched < self.early and self.sequence[self.launched].pending <= 0:
            self.launch_next(reducer)

    def launch_next(self, reducer: Reducer, *, empty: bool = False) -> None:
        """Copy the next bucket's gradients in, with one fused copy, and start its collective.

        Collective: every rank, in launch order. Does not block.
        """
        bucket = self.sequence[self.launched]
        self.launched += 1
        fill(bucket, self, empty=empty, check=reducer.check_finite != "off")
        if self.before_last is not None:
            self.before_last()  # writes the control tail, which counts what ``fill`` has just seen
        bucket.is_last = self.launched == len(self.sequence)
        launched = now()  # gloo's threads may run before the call returns
        work = reducer.wire.launch(bucket)
        self.in_flight.append((bucket, work))
        self.times.launched(bucket.index, bucket.nbytes, bucket.ready, launched, work)

    def give_up(self, reducer: Reducer, error: BaseException) -> None:
        """Send what is left as zeros with the error flag; wait a little; never raise."""
        for slot in self.touched:
            slot.kept = None
        if not self.sequence or not reducer.wire.carries_flags:
            return  # nothing was agreed yet: the failure channel tells the others
        try:
            while self.launched < len(self.sequence):
                bucket = self.sequence[self.launched]
                if self.launched == len(self.sequence) - 1 and bucket.carries_control:
                    bucket.allocate()
                    bucket.control.zero_()
                    bucket.control[Control.ERROR] = 1
                self.launch_next(reducer, empty=True)
            deadline = time.monotonic() + GIVE_UP_S
            for _, work in self.in_flight:
                done = getattr(work, "is_completed", lambda: True)
                while not done() and time.monotonic() < deadline:
                    time.sleep(0.001)
            if time.monotonic() < deadline:
                reducer.group.all_gather_object(repr(error))  # the others ask what went wrong
        except RuntimeError:
            return  # a peer is gone; its own error is the one that matters


def _sequence(reducer: Reducer, partition: int | None) -> tuple[list[Bucket], int]:
    """Return this session's buckets in launch order, and how many may leave before the backward ends.

    A bucket takes part if any of its parameters is trainable: a GAN's untouched half stays at home.
    """
    live = []
    for bucket in reducer.layout.buckets:
        if partition is not None and bucket.slots[0].partition != partition:
            continue
        bucket.ready = 0.0
        bucket.pending = [slot.param.requires_grad for slot in bucket.slots].count(True)
        if bucket.pending:
            live.append(bucket)
    live.sort(key=lambda bucket: bucket.deferred)
    early = sum(not bucket.deferred for bucket in live)
    if not reducer.wire.carries_flags:
        return live, early
    for position in reversed(range(len(live))):
        if live[position].carries_control:
            # The carrier leaves when the backward has ended and everything is known. It holds the
            # gradients that arrive last, so it would hardly leave sooner.
            early -= position < early
            live.append(live.pop(position))
            break
    return live, early


@torch.no_grad()  # a gradient of ``create_graph`` is copied, not differentiated
def fill(bucket: Bucket, session: Session, *, empty: bool = False, check: bool = False) -> None:
    """Copy local gradients into ``bucket`` and take them away from ``.grad``.

    What is copied is multiplied with ``session.share``. A parameter without a gradient contributes zeros
    and a zero flag. ``.grad`` is emptied so that nothing can write into memory that is in flight.
    """
    bucket.allocate()
    bucket.unused.clear()
    share = session.share
    late: list[Tensor] = []  # large ones that were not taken when they arrived
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for position, slot in enumerate(bucket.slots):
        param = slot.param
        grad = param.grad
        view = slot.view
        assert view is not None
        if slot.taken == session.number and not empty:
            if grad is not None:
                view.add_(grad.detach(), alpha=share)  # it fired again before the bucket left
                param.grad = None
            continue
        if grad is None or empty or slot.gone:
            view.zero_()
            if not slot.gone:
                bucket.unused.append(position)
                param.grad = None
            continue
        if grad is not slot.grad_view:
            if slot.grad_view is None and not grad.is_sparse:
                slot.kept = grad
                session.touched.append(slot)
            targets.append(view)
            sources.append(_real_and_dense(grad) if slot.is_complex or grad.is_sparse else grad)
        if share != 1.0 and position < bucket.eager_slots:
            late.append(view)
        param.grad = None
    if targets:
        torch._foreach_copy_(targets, sources)
    if share != 1.0:
        bucket.not_eager.mul_(share)
        for view in late:
            view.mul_(share)
    bucket.flags.fill_(share)
    for position in bucket.unused:
        bucket.flags[position] = 0
    if check:
        _check_finite(bucket, session)


def _real_and_dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.to_dense()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _check_finite(bucket: Bucket, session: Session) -> None:
    views = [slot.view for slot in bucket.slots if slot.view is not None]
    wide = torch.promote_types(
        bucket.dtype, torch.float32
    )  # a half's norm overflows before it does
    norms = torch._foreach_norm(views, 2, wide)
    squared = torch.stack([norm.double() for norm in norms]).square()
    session.squared_norm += float(squared.sum()) / session.share**2
    if not torch.isfinite(squared).all():
        finite = [bool(torch.isfinite(view).all()) for view in views]
        session.non_finite += [s.name for s, ok in zip(bucket.slots, finite, strict=True) if not ok]
