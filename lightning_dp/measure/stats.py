"""``StepStats``: what one reduction cost. Plain numbers, pulled, never a synchronisation in the step."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.engine.control import WindowTotals
from lightning_dp.engine.reduction.timing import ReductionTimes


@dataclass(frozen=True)
class StepStats:
    """What one accumulation window's reduction cost on this rank.

    Attributes:
        exposed_ms: Time spent waiting for collectives after the backward had ended.
        wire_ms: Time in which at least one collective was under way.
        hidden_pct: Share of ``wire_ms`` that the backward hid, in percent.
        backward_ms: From the first gradient of the loss to the last parameter's.
        bytes: Bytes that this rank put into collectives.
        bus_gb_s: Bus bandwidth as nccl-tests define it: ``bytes / time * 2 (n - 1) / n``, in GB/s.
        straggler_ms: Standard deviation over ranks of ``backward_ms``.
        buckets: Collectives.
        window_weight: Sum of weights over ranks and micro-batches.
        window_micro_batches: Micro-batches over ranks.
        loss: Weighted mean loss of the window over ranks.
        state_bytes: Bytes of optimizer state that this rank holds.
    """

    exposed_ms: float
    wire_ms: float
    hidden_pct: float
    backward_ms: float
    bytes: int
    bus_gb_s: float
    straggler_ms: float
    buckets: int
    window_weight: float
    window_micro_batches: float
    loss: float
    state_bytes: int = 0


def step_stats(
    times: ReductionTimes, totals: WindowTotals | None, world_size: int, state_bytes: int = 0
) -> StepStats:
    """Work out one step's statistics from the engine's clock reads.

    Args:
        times: Of the session.
        totals: Of the window; ``None`` leaves its numbers at NaN.
        world_size: Replicas.
        state_bytes: Bytes of optimizer state that this rank holds.
    """
    times.settle()
    wire = _union_s([(each.launched, max(each.done, each.launched)) for each in times.buckets])
    exposed = min(times.exposed_s, wire) if wire else times.exposed_s
    nbytes = sum(each.nbytes for each in times.buckets)
    bus = nbytes / wire * 2 * (world_size - 1) / world_size / 1e9 if wire else 0.0
    nan = float("nan")
    return StepStats(
        exposed_ms=times.exposed_s * 1e3,
        wire_ms=wire * 1e3,
        hidden_pct=100 * (1 - exposed / wire) if wire else 100.0,
        backward_ms=(times.backward_end - times.begin) * 1e3,
        bytes=nbytes,
        bus_gb_s=bus,
        straggler_ms=totals.straggler_s * 1e3 if totals is not None else nan,
        buckets=len(times.buckets),
        window_weight=totals.weight if totals is not None else nan,
        window_micro_batches=totals.micro_batches if totals is not None else nan,
        loss=totals.loss if totals is not None else nan,
        state_bytes=state_bytes,
    )


def _union_s(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of time spans."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
