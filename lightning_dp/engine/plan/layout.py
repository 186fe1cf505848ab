"""The buckets that exist: planned once from an agreement, only ever appended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dp.engine.bucket import UNCUT, Bucket, Slicing, Slot
from lightning_dp.engine.plan.agreement import Agreement
from lightning_dp.engine.plan.cut import SlotSpec, plan_buckets

MIB = 2**20


@dataclass(frozen=True)
class LayoutOptions:
    """How buckets are cut.

    Attributes:
        cap_bytes: Most bytes of a bucket.
        first_bytes: Most bytes of the first bucket.
        last_bytes: Most bytes of the last bucket.
        reduce_dtype: Type of buckets; ``None`` keeps each gradient's own.
        tune: Whether sizes are to be chosen by measuring (``bucket_cap_mb="auto"``).
        advise: Whether to say then what another wire would gain.
        slicing: How the wire cuts a bucket into slices.
    """

    cap_bytes: int = 4 * MIB
    first_bytes: int = 1 * MIB
    last_bytes: int = 1 * MIB
    reduce_dtype: torch.dtype | None = None
    tune: bool = False
    advise: bool = False
    slicing: Slicing = UNCUT

    def wire_dtype(self, slot: Slot) -> torch.dtype:
        """The type in which the slot's gradient travels."""
        real = slot.param.dtype.to_real()
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
        self.remembered: list[
            dict[str, Any]
        ] = []  # buckets of the run that is resumed, to be cut again
        self.forgotten = False  # they could not be

    def describe(self) -> list[dict[str, Any]]:
        """Plain data from which a resumed run cuts the same buckets: see ``remembered``."""
        return [{"dtype": str(bucket.dtype), "names": bucket.names} for bucket in self.buckets]

    @property
    def signature(self) -> list[list[int]]:
        """Parameter numbers by bucket."""
        return [[slot.index for slot in bucket.slots] for bucket in self.buckets]

    def live(
        self, partitions: frozenset[int] | None, passed: frozenset[int | str] = frozenset()
    ) -> frozenset[int]:
        """What takes part in a reduction: numbers of buckets, and ``~number`` of each sparse slot.

        That is what has a trainable parameter, or had one in earlier micro-batches of the window
        (``passed``). A GAN's untouched half stays at home.
        """
        places = {b.index: b.slots for b in self.buckets}
        places |= {~slot.index: [slot] for slot in self.sparse}
        return frozenset(
            number
            for number, slots in places.items()
            if (partitions is None or slots[0].partition in partitions)
            and (number in passed or any(slot.param.requires_grad for slot in slots))
        )

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
            specs.append(self.spec(slot))
        cap, first, last = self._caps()
        planned = self._again(specs, slots)
        done = {number for numbers in planned for number in numbers}
        rest = [spec for spec in specs if spec.index not in done]
        early = [spec for spec in rest if not slots[spec.index].deferred]
        late = [spec for spec in rest if slots[spec.index].deferred]
        planned += plan_buckets(early, cap, first, last) + plan_buckets(late, cap, cap, cap)
        self.forgotten = bool(self.remembered and rest)
        new = self._make(planned, slots, len(self.buckets))
        self.buckets.extend(new)
        return new

    def _again(self, specs: Sequence[SlotSpec], slots: Sequence[Slot]) -> list[list[int]]:
        """Take remembered buckets, in their order, as long as all their parameters are there."""
        by_name = {slots[spec.index].name: spec for spec in specs}
        planned: list[list[int]] = []
        while self.remembered:
            bucket = self.remembered[0]
            found = [by_name.get(name) for name in bucket["names"]]
            keys = {spec.key for spec in found if spec is not None}
            dtypes = {key[0] for key in keys}
            if None in found or len(keys) != 1 or dtypes != {bucket["dtype"]}:
                break
            planned.append([spec.index for spec in found if spec is not None])
            self.remembered.pop(0)
        return planned

    def spec(self, slot: Slot) -> SlotSpec:
        """What planning needs to know of ``slot``."""
        dtype = self.options.wire_dtype(slot)
        return SlotSpec(
            slot.index, slot.numel * dtype.itemsize, (str(dtype), slot.partition, slot.sliced)
        )

    def defer(self, names: Sequence[str], slots: Sequence[Slot]) -> None:
        """Send the buckets of these parameters last from now on. Every rank must do the same."""
        wanted = set(names)
        for slot in slots:
            if slot.name in wanted:
                slot.deferred = True
                if slot.bucket is not None:
                    slot.bucket.deferred = True

    def replan(self, order: Sequence[int], slots: Sequence[Slot], options: LayoutOptions) -> None:
        """Cut the buckets of the slots in ``order`` anew; others stay. Between two sessions only.

        Gradients that live in the old buckets stay valid: they keep that memory alive.
        """
        self.options = options
        concerned = set(order)
        kept = [b for b in self.buckets if not concerned.issuperset(s.index for s in b.slots)]
        planned = plan_buckets([self.spec(slots[number]) for number in order], *self._caps())
        for number in order:
            slots[number].view = slots[number].grad_view = None
        self.buckets = self._make(planned, slots, 0) + kept
        for index, bucket in enumerate(self.buckets):
            bucket.index = index

    def _make(self, planned: list[list[int]], slots: Sequence[Slot], first: int) -> list[Bucket]:
        buckets = []
        for index, numbers in enumerate(planned, first):
            members = [slots[number] for number in numbers]
            dtype = self.options.wire_dtype(members[0])
            buckets.append(Bucket(index, members, dtype, self.device, self.options.slicing))
        return buckets

    def _caps(self) -> tuple[int, int, int]:
        return self.options.cap_bytes, self.options.first_bytes, self.options.last_bytes
