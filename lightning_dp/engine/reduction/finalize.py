"""The end of a session: launch the rest, hand gradients back, settle what the ranks must agree on."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.plan.agreement import Profile, agree
from lightning_dp.engine.reduction.copy_out import hand_back_rest, hand_back_used
from lightning_dp.engine.reduction.report import Report, act_on
from lightning_dp.engine.reduction.sparse import check_sparse, reduce_sparse
from lightning_dp.engine.reduction.timing import now
from lightning_dp.engine.reduction.window import CONTROL_SIZE, Control
from lightning_dp.engine.wires.waiting import wait_patiently
from lightning_dp.engine.wires.wire import InFlight

if TYPE_CHECKING:
    from lightning_dp.engine.reduction.reducer import Reducer
    from lightning_dp.engine.reduction.session import Session

log = logging.getLogger(__name__)


def finish(reducer: Reducer, session: Session) -> None:
    """Complete ``session``; see ``Reducer.finalize``.

    Collective: every rank, once per session. Blocks (on CUDA: the stream only).
    """
    if reducer.keeper is not None and reducer.window.ends:
        session.buffers = reducer.keeper.changed()
    try:
        if reducer.group.world_size == 1:
            _finish_alone(reducer)
        else:
            _finish_together(reducer, session)
    except BaseException:
        reducer.registry.clear_gradients()
        raise
    finally:
        if reducer.window.ends:
            reducer.window.reset()


def _finish_alone(reducer: Reducer) -> None:
    """World of one: nothing to send; only the window's weight is left to divide by."""
    tail = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
    reducer.window.write(tail)
    reducer.keep_totals(tail)
    _scale([s.param.grad for s in reducer.registry.slots], _factor(reducer, tail))


def _finish_together(reducer: Reducer, session: Session) -> None:
    """One round for the buckets that exist; rarely a second one, for parameters that have none yet."""
    tail: Tensor | None = None
    unplanned = [
        slot
        for slot in reducer.registry.unplanned()
        if slot.param.requires_grad and session.partition in (None, slot.partition)
    ]
    if reducer.check_finite != "off":
        check_sparse(reducer.registry.slots, session)
    if session.sequence or (_sparse(reducer, session) and not unplanned):
        tail = _round(reducer, session, new=bool(unplanned))
    # Reading the tail would stop the host of an accelerator; there each rank trusts its own view.
    read = reducer.group.host_reads_are_free
    if unplanned or (read and tail is not None and bool(tail[Control.NEW] > 0)):
        _plan(reducer, session, unplanned)
        later = _round(reducer, session, new=False)
        tail = tail if tail is not None else later
    if tail is not None:
        sparse = _sparse(reducer, session)
        reduce_sparse(sparse, reducer.group)
        _scale([slot.param.grad for slot in sparse], _factor(reducer, tail))
        reducer.keep_totals(tail)


def _sparse(reducer: Reducer, session: Session) -> list[Slot]:
    """Slots with sparse gradients that take part, by the rule for buckets."""
    return [
        slot
        for slot in reducer.layout.sparse
        if slot.param.requires_grad and session.partition in (None, slot.partition)
    ]


def _plan(reducer: Reducer, session: Session, unplanned: list[Slot]) -> None:
    """Give buckets to parameters that have none; they are this session's second round.

    Collective: every rank. Blocks.
    """
    # Outside of a backward nothing fired: what has a gradient then stands for the order of arrival.
    present = [slot for slot in reversed(unplanned) if slot.param.grad is not None]
    fired = [slot for slot in session.fired.values() if not slot.planned] or present
    agreement = agree(
        Profile(
            trainable=[slot.index for slot in unplanned],
            fired=[slot.index for slot in fired],
            repeated=sorted(session.repeated),
            nested=sorted(session.nested),
            sparse=[
                slot.index
                for slot in unplanned
                if (slot.expects_sparse if slot.param.grad is None else slot.param.grad.is_sparse)
            ],
        ),
        reducer.group,
        reducer.registry.names,
    )
    new = reducer.layout.extend(agreement, reducer.registry.slots)
    reducer.announce(new, agreement)
    session.sequence = new
    session.launched = 0


def _round(reducer: Reducer, session: Session, *, new: bool) -> Tensor:
    """Send the rest of ``session.sequence``, hand gradients back; return the reduced control tail.

    Collective: every rank. One collective a bucket, and a small one only where no bucket can carry the
    tail (all-half-precision models, communication hooks).
    """
    carrier = session.sequence[-1] if session.sequence else None
    if carrier is not None and not (reducer.wire.carries_flags and carrier.carries_control):
        carrier = None
    while session.launched < len(session.sequence):
        if carrier is not None and session.launched == len(session.sequence) - 1:
            carrier.allocate()
            session.before_last = partial(
                _write_tail, reducer, session, carrier.control, new=new, share=session.share
            )
        session.launch_next(reducer)
    session.before_last = None
    separate = None if carrier is not None else _send_separately(reducer, session, new=new)
    for bucket, _ in session.in_flight:
        hand_back_used(bucket)  # in the shadow of the collectives
    session.times.waits(reducer.group.device)
    for position, (bucket, work) in enumerate(session.in_flight):
        session.waiting_for = bucket
        wait_patiently(work, on_host=reducer.group.host_reads_are_free)
        session.times.waited(position - len(session.in_flight), work)
    session.waiting_for = None
    tail = carrier.control if carrier is not None else _receive(session, separate)
    session.times.ends()
    report = reducer.next_report(Report(tail, session, reducer.group.host_reads_are_free))
    if report is not None:
        act_on(reducer, report)
    factor = _factor(reducer, tail)
    for bucket, _ in session.in_flight:
        _scale([bucket.grads], factor)
        hand_back_rest(bucket)
    session.in_flight = []
    return tail


def _write_tail(
    reducer: Reducer, session: Session, tail: Tensor, *, new: bool, share: float = 1.0
) -> None:
    backward_s = now() - session.times.begin
    news = {
        Control.BACKWARD_S: backward_s,
        Control.BACKWARD_S2: backward_s**2,
        Control.LATE: len(session.late),
        Control.NEW: new,
        Control.NON_FINITE: len(session.non_finite),
        Control.SQUARED_NORM: session.squared_norm,
        Control.BUFFERS: len(session.buffers),
    }
    reducer.window.write(tail, news)
    if share != 1.0:
        tail.mul_(share)


def _send_separately(
    reducer: Reducer, session: Session, *, new: bool
) -> tuple[Tensor, InFlight | None]:
    """Send the tail, and the flags if the wire does not carry them, on their own."""
    tail = torch.zeros(CONTROL_SIZE, device=reducer.group.device)
    _write_tail(reducer, session, tail, new=new)
    flags = [] if reducer.wire.carries_flags else [b.flags.float() for b, _ in session.in_flight]
    message = torch.cat([tail, *flags])
    work = dist.all_reduce(
        message, op=dist.ReduceOp.AVG, group=reducer.group.process_group, async_op=True
    )
    return message, work


def _receive(session: Session, separate: tuple[Tensor, InFlight | None] | None) -> Tensor:
    assert separate is not None
    message, work = separate
    if work is not None:
        work.wait()
    offset = CONTROL_SIZE
    if message.numel() > CONTROL_SIZE:
        for bucket, _ in session.in_flight:
            bucket.flags.copy_(message[offset : offset + len(bucket.slots)])
            offset += len(bucket.slots)
    return message[:CONTROL_SIZE]


def _factor(reducer: Reducer, tail: Tensor) -> Tensor | float:
    """What a mean over ranks must be multiplied with to be the window's weighted mean."""
    window = reducer.window
    if not window.weighted or not window.ends:
        return 1.0
    if reducer.group.host_reads_are_free:
        return window.factor(float(tail[Control.WEIGHT]), torch.finfo(tail.dtype).eps)
    weight = tail[Control.WEIGHT]
    return torch.where(weight > 0, window.divisor / weight, torch.ones_like(weight))


def _scale(grads: list[Tensor | None], factor: Tensor | float) -> None:
    if isinstance(factor, float) and factor == 1.0:
        return
    for grad in grads:
        if grad is not None:
            grad.mul_(factor)
