"""The one moment at which bucket sizes may change: after a reduction whose arrivals were measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.advice import Backward, say_advice
from lightning_dp.engine.plan.cost import MIB, Choice, Link, choose
from lightning_dp.engine.plan.layout import Layout
from lightning_dp.engine.plan.registry import Registry
from lightning_dp.engine.plan.tuning import measure_link

log = logging.getLogger(__name__)

TUNE_AT = 3  # the first reductions allocate and learn; this one is typical
LEAST_BYTES = 2 * MIB  # below, every layout is one or two messages


def retune(
    layout: Layout,
    registry: Registry,
    group: ReplicaGroup,
    sequence: Sequence[Bucket],
    arrivals: Mapping[int, float],
    begin: float,
    end: float,
    ratio: float = 1.0,
) -> None:
    """Choose bucket sizes from what one reduction measured; rank 0 decides for all.

    Only buckets that took part are cut anew, and those sent last on purpose stay as they are.

    Args:
        layout: Cut anew.
        registry: Whose parameters.
        group: Who takes part.
        sequence: The buckets that took part.
        arrivals: When each slot's gradient arrived, by slot number, on the clock of ``begin`` and ``end``.
        begin: When the backward began.
        end: When it had ended.
        ratio: Which part of the bytes of fp32 gradients the wire sends.

    Collective: every rank, once, at the end of the reduction numbered ``TUNE_AT``. Blocks.
    """
    early = [bucket for bucket in sequence if not bucket.deferred]
    slots = [slot for bucket in early for slot in bucket.slots]
    if sum(layout.spec(slot).nbytes for slot in slots) < LEAST_BYTES:
        return
    # What did not arrive this time is sent when the backward has ended.
    order = sorted(slots, key=lambda slot: arrivals.get(slot.index, end))
    link = measure_link(group)
    specs = [layout.spec(slot) for slot in order]
    arrived = [arrivals.get(slot.index, end) - begin for slot in order]
    backward = Backward(arrived, specs, end - begin)
    choice = choose(arrived, specs, end - begin, link.coded(backward.ratio(ratio)))
    if layout.options.advise and group.rank == 0:
        say_advice(backward, link, choice, group.world_size)
    numbers = [slot.index for slot in order]
    numbers, choice = group.broadcast_object((numbers, choice))
    cap, first, last = choice.caps
    options = replace(layout.options, cap_bytes=cap, first_bytes=first, last_bytes=last, tune=False)
    layout.replan(numbers, registry.slots, options)
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
