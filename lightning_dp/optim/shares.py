"""Which part of each parameter a rank updates: a flat range of its memory, all of it, or nothing.

A bucket is cut into equal slices, one a rank, so that every rank has the same work whatever the sizes of
tensors are. Where an optimizer needs whole tensors, each has an owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.plan.layout import Layout
from lightning_dp.optim.kinds import Sharding


@dataclass(frozen=True)
class Share:
    """What this rank updates of one parameter.

    Attributes:
        slot: Whose.
        begin: First element, in the order of the parameter's memory.
        end: One behind the last.
    """

    slot: Slot
    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.end - self.begin == self.slot.param.numel()

    @property
    def is_empty(self) -> bool:
        """Whether this rank updates nothing of it."""
        return self.begin == self.end

    def of(self, tensor: Tensor) -> Tensor:
        """The flat view of this range of ``tensor``, whose elements lie in memory as the parameter's do."""
        first = tensor.storage_offset() + self.begin
        return tensor.as_strided((self.end - self.begin,), (1,), first)

    def part(self, tensor: Tensor) -> Tensor:
        """As :meth:`of`; a tensor that is this rank's as a whole keeps its shape."""
        return tensor if self.is_whole else self.of(tensor)


def slice_share(bucket: Bucket, position: int, rank: int) -> Share:
    """What ``rank`` updates of the slot at ``position`` of ``bucket``."""
    slot, offset = bucket.slots[position], bucket.offsets[position]
    length = bucket.slice_numel
    begin = min(max(rank * length - offset, 0), slot.param.numel())
    end = min(max((rank + 1) * length - offset, 0), slot.param.numel())
    return Share(slot, begin, end)


@dataclass(eq=False)
class Shares:
    """Every rank's share of the parameters that have a bucket; follows the layout as it grows.

    Attributes:
        layout: The buckets.
        rank: This rank.
        world_size: How many there are.
        sharding_of: How the work on a slot's parameter is divided.
        slots: Yields all slots: one rank alone has no buckets, and updates all of every parameter.
        buckets: Those that were taken in, also after the layout has let go of them.
    """

    layout: Layout
    rank: int
    world_size: int
    sharding_of: Callable[[Slot], Sharding]
    slots: Callable[[], Sequence[Slot]] = tuple
    buckets: list[Bucket] = field(default_factory=list)
    _mine: dict[int, Share] = field(default_factory=dict)  # by id of the parameter
    _places: dict[int, tuple[Bucket, int]] = field(default_factory=dict)  # by the same
    _owners: dict[int, int] = field(default_factory=dict)  # of whole tensors, by slot number
    _owned: Counter[int] = field(default_factory=Counter)  # bytes by rank

    def follow_layout(self) -> bool:
        """Take in buckets that were made since; return whether there are any."""
        if self.world_size == 1:
            return self._follow_slots()
        new = self.layout.buckets[len(self.buckets) :]
        self.buckets += new
        for bucket in new:
            for position, slot in enumerate(bucket.slots):
                sharding = self.sharding_of(slot)
                if slot.param.numel() == 0 or sharding is Sharding.REPLICATED:
                    continue
                if sharding is Sharding.TENSORS:
                    self._give_owner(slot)
                self._mine[id(slot.param)] = self.of_rank(bucket, position, self.rank)
                self._places[id(slot.param)] = bucket, position
        return bool(new)

    def _follow_slots(self) -> bool:
        before = len(self._mine)
        for slot in self.slots():
            new = id(slot.param) not in self._mine and slot.param.numel() > 0
            if new and self.sharding_of(slot) is not Sharding.REPLICATED:
                self._mine[id(slot.param)] = Share(slot, 0, slot.param.numel())
        return len(self._mine) > before

    def _give_owner(self, slot: Slot) -> None:
        """Give the tensor to the rank that owns least so far, the lower one of two."""
        owner = min(range(self.world_size), key=self._owned.__getitem__)
        self._owned[owner] += slot.param.numel() * slot.param.itemsize
        self._owners[slot.index] = owner

    def of(self, parameter: Tensor) -> Share | None:
        """What this rank updates of ``parameter``; ``None`` where every rank updates all of it."""
        return self._mine.get(id(parameter))

    def of_rank(self, bucket: Bucket, position: int, rank: int) -> Share:
        """What ``rank`` updates of a parameter that is divided."""
        slot = bucket.slots[position]
        owner = self._owners.get(slot.index)
        if owner is None:
            return slice_share(bucket, position, rank)
        return Share(slot, 0, slot.param.numel() if rank == owner else 0)

    def most(self, share: Share) -> int:
        """The rank that updates most of the share's parameter, the lower one of two."""
        if self.world_size == 1:
            return 0
        place = self._places[id(share.slot.param)]  # the slot's own is gone when training has ended
        every = [self.of_rank(*place, rank) for rank in range(self.world_size)]
        lengths = [each.end - each.begin for each in every]
        return lengths.index(max(lengths))

    def divided(self, bucket: Bucket) -> list[int]:
        """Positions in ``bucket`` whose parameters are divided between ranks."""
        return [n for n, slot in enumerate(bucket.slots) if id(slot.param) in self._mine]
