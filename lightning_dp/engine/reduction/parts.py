"""What a reduction is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.control import Reading
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.agreement import Agreement
from lightning_dp.engine.plan.layout import Layout
from lightning_dp.engine.plan.registry import Registry
from lightning_dp.engine.reduction.failure import Supervision
from lightning_dp.engine.reduction.finite import FiniteCheck
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.engine.wires.wire import Wire


@dataclass(frozen=True)
class Parts:
    """What a reduction needs; the same for all of them."""

    group: ReplicaGroup
    window: AccumulationWindow
    wire: Wire
    layout: Layout
    registry: Registry
    buffers: BufferKeeper | None
    supervision: Supervision


@dataclass
class Outcome:
    """What came of a reduction.

    Attributes:
        control: The reduced control block; ``None`` where nothing was sent.
        late: Names of parameters whose second gradient came too late, on this rank.
        buffers: Names of buffers that changed, on this rank.
        finite: The look at local gradients, where it was asked for.
        agreement: What ranks agreed on for parameters that had no bucket.
        new_buckets: The buckets that were made for them.
        stop: Whether some rank asks to stop, where that is known at once.
    """

    control: Reading | None = None
    late: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    finite: FiniteCheck | None = None
    agreement: Agreement | None = None
    new_buckets: list[Bucket] = field(default_factory=list)
    stop: bool = False
