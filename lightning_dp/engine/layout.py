"""The buckets that exist: planned once from an agreement, only ever appended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dp.engine.agreement import Agreement
from lightning_dp.engine.bucket import Bucket, Slot, SlotSpec, plan_buckets

MIB = 2**20


@dataclass(frozen=True)
class LayoutOptions:
    """How buckets are cut.

    Attributes:
        cap_bytes: Most bytes of a bucket.
        first_bytes: Most bytes of the first bucket.
        last_bytes: Most bytes of the last bucket.
        reduce_dtype: Type on the wire; ``None`` sends each gradient in its own.
    """

    cap_bytes: int = 4 * MIB
    first_bytes: int = 1 * MIB
    last_bytes: int = 1 * MIB
    reduce_dtype: torch.dtype | None = None

    def wire_dtype(self, slot: Slot) -> torch.dtype:
        """The type in which the slot's gradient travels."""
        dtype = slot.param.dtype
        real = dtype.to_real() if dtype.is_complex else dtype
        # reduce_dtype is for single and half precision: a double keeps its digits.
        if self.reduce_dtype is None or real == torch.float64:
            return real
        return self.reduce_dtype


class Layout:
    """All buckets, in planning order.

    Attributes:
        buckets: Their place is their index.
        sparse: Slots with sparse gradients: these never enter a bucket.
        signature: Parameter numbers by bucket, for comparing ranks.
    """

    def __init__(self, device: torch.device, options: LayoutOptions) -> None:
        self.device = device
        self.options = options
        self.buckets: list[Bucket] = []
        self.sparse: list[Slot] = []

    @property
    def signature(self) -> list[list[int]]:
        """Parameter numbers by bucket."""
        return [[slot.index for slot in bucket.slots] for bucket in self.buckets]

    def extend(self, agreement: Agreement, slots: Sequence[Slot]) -> list[Bucket]:
        """Plan buckets for the parameters of ``agreement``; return the new ones in launch order."""
        specs = []
        for number in agreement.order:
            slot = slots[number]
            slot.deferred = slot.deferred or number in agreement.deferred
            slot.nested = number in agreement.nested
            if number in agreement.sparse:
                slot.sparse = True
                self.sparse.append(slot)
                continue
            dtype = self.options.wire_dtype(slot)
            key = (str(dtype), slot.partition)
            specs.append(SlotSpec(number, slot.numel * dtype.itemsize, key))
        cap, first, last = self._caps()
        early = [spec for spec in specs if not slots[spec.index].deferred]
        late = [spec for spec in specs if slots[spec.index].deferred]
        planned = plan_buckets(early, cap, first, last) + plan_buckets(late, cap, cap, cap)
        new: list[Bucket] = []
        for numbers in planned:
            members = [slots[number] for number in numbers]
            dtype = self.options.wire_dtype(members[0])
            new.append(Bucket(len(self.buckets) + len(new), members, dtype, self.device))
        self.buckets.extend(new)
        return new

    def _caps(self) -> tuple[int, int, int]:
        return self.options.cap_bytes, self.options.first_bytes, self.options.last_bytes
