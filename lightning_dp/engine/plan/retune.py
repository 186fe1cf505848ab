"""The one moment at which bucket sizes may change: after a session whose arrivals were measured."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_dp.engine.plan.tuning import MIB, Choice, Link, choose, measure_link

if TYPE_CHECKING:
    from lightning_dp.engine.reduction.reducer import Reducer
    from lightning_dp.engine.reduction.session import Session

log = logging.getLogger(__name__)

TUNE_AT = 3  # the first sessions allocate and learn; this one is typical
LEAST_BYTES = 2 * MIB  # below, every layout is one or two messages


def tune(reducer: Reducer, session: Session) -> None:
    """Choose bucket sizes from what ``session`` measured; rank 0 decides for all.

    Only buckets that took part are cut anew, and those sent last on purpose stay as they are.

    Collective: every rank, once, at the end of the session numbered ``TUNE_AT``. Blocks.
    """
    layout, group = reducer.layout, reducer.group
    arrivals = session.arrivals or {}
    session.arrivals = None
    early = [bucket for bucket in session.sequence if not bucket.deferred]
    slots = [slot for bucket in early for slot in bucket.slots]
    if sum(layout.spec(slot).nbytes for slot in slots) < LEAST_BYTES:
        return
    end = session.times.backward_end
    # What did not arrive this time is sent when the backward has ended.
    order = sorted(slots, key=lambda slot: arrivals.get(slot.index, end))
    link = measure_link(group)
    begin = session.times.begin
    specs = [layout.spec(slot) for slot in order]
    choice = choose(
        [arrivals.get(slot.index, end) - begin for slot in order], specs, end - begin, link
    )
    numbers = [slot.index for slot in order]
    numbers, choice = group.broadcast_object((numbers, choice))
    cap, first, last = choice.caps
    options = replace(layout.options, cap_bytes=cap, first_bytes=first, last_bytes=last, tune=False)
    layout.replan(numbers, reducer.registry.slots, options)
    if group.rank == 0:
        _say(choice, sum(spec.nbytes for spec in specs), end - begin, link)


def _say(choice: Choice, nbytes: int, backward_s: float, link: Link) -> None:
    log.info(
        "lean_ddp: buckets of %.3g MiB, the first of %.3g, the last of %.3g: %.1f MiB of gradients,"
        " %.0f ms of backward, %.2f ms and %.2f ms/MiB a message, %.2f ms between messages; expected"
        " wait %.0f ms (with 25 MiB: %.0f ms).",
        *(size / MIB for size in choice.caps),
        nbytes / MIB,
        backward_s * 1e3,
        link.latency_s * 1e3,
        link.s_per_byte * MIB * 1e3,
        link.gap_s * 1e3,
        choice.exposed_s * 1e3,
        choice.exposed_default_s * 1e3,
    )
