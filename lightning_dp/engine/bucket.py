"""Buckets: which gradients travel together, and the flat memory that they travel in.

``plan_buckets`` is planning with integers alone. ``Bucket`` owns storage:

    flat:  [ grad of slot 0 | grad of slot 1 | ... | used-flags, one a slot | control block ]

Where a wire sums in equal slices (``Slicing``), the gradients' part is padded so that it can be cut, and
slots begin at boundaries of 64 bytes.

A slot's view has the *parameter's* strides, so a channels_last weight gets a channels_last gradient
and nothing is copied twice. The used-flags say which slots had a gradient on this rank; they are
averaged with the rest, so a flag above zero means "some rank used it" ([Note: unused parameters]).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_dp.engine.control import CONTROL_SIZE
from lightning_dp.errors import ConfigError
from lightning_dp.internals.autograd import storage_uses

ALIGN_BYTES = 16
# In slices, so that fused optimizers, which work in vectors of the processor, treat the same elements alike
# whether they get a tensor or a part of it.
SLICE_ALIGN_BYTES = 64
RELEASE_BYTES = 32 * 1024  # least mean size of a gradient for which memory goes back between steps
# Above this, a copy while the gradient is in the cache pays for its call (measured on a CPU).
COPY_EARLY_BYTES = 32 * 1024


@dataclass(frozen=True)
class Slicing:
    """How the gradients' part of a bucket is cut into equal slices, one a rank.

    Attributes:
        count: How many slices; 1 means that nobody cuts it.
        block: A slice has a multiple of so many elements, at least (a power of two).
    """

    count: int = 1
    block: int = 1

    def align(self, dtype: torch.dtype) -> int:
        """Of how many elements the places of slots are multiples."""
        return max(1, (ALIGN_BYTES if self.count == 1 else SLICE_ALIGN_BYTES) // dtype.itemsize)

    def padded(self, numel: int, dtype: torch.dtype) -> int:
        """``numel`` rounded up to whole slices; a slice is a multiple of 64 bytes and of ``block``."""
        unit = 1 if self.count == 1 else self.count * max(self.block, self.align(dtype))
        return -(-numel // unit) * unit


UNCUT = Slicing()


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """One parameter's place in the engine."""

    index: int
    name: str
    param: nn.Parameter
    is_complex: bool = field(init=False)
    partition: int = 0  # buckets never mix partitions (the strategy passes optimizers)
    sliced: bool = False  # its optimizer updates equal slices of buckets; none mixes both kinds
    bucket: Bucket | None = None
    view: Tensor | None = None  # into the bucket, real dtype
    grad_view: Tensor | None = None  # what ``param.grad`` becomes
    local_grad: Tensor | None = None  # the local gradient, when its dtype is not the bucket's
    copy_early: bool = False  # large, on a CPU: copied when it arrives
    copied_in: int = -1  # the reduction in which it was
    reduction: int = -1  # the last reduction in which it fired
    nested: bool = False  # fires inside a re-entrant backward, and only once
    deferred: bool = False  # may fire more than once: its bucket is sent last
    sparse: bool = False
    expects_sparse: bool = False  # the weight of an Embedding(sparse=True)
    removed: bool = False  # no longer in the module: its place stays, its memory does not

    def __post_init__(self) -> None:
        self.is_complex = self.param.is_complex()

    def let_go(self) -> None:
        """The module dropped the parameter: keep its shape for the layout, not its memory."""
        old = self.param
        shell = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
        self.param = nn.Parameter(shell, requires_grad=False)
        self.removed = True
        self.copy_early = False
        self.grad_view = self.local_grad = None
        if self.bucket is not None:
            self.bucket.same_dtype[self.bucket.slots.index(self)] = True  # nothing to copy back

    @property
    def planned(self) -> bool:
        """Whether it is known how its gradient travels."""
        return self.bucket is not None or self.sparse

    @property
    def numel(self) -> int:
        """Real numbers to send (a complex one counts twice)."""
        return self.param.numel() * (2 if self.param.is_complex() else 1)


class Bucket:
    """Gradients that travel in one collective.

    Attributes:
        index: Its place in the launch order; equal on all ranks.
        slots: In the order of their memory.
        flat: ``(numel,)`` storage of gradients, flags and control block; ``None`` while released.
        carries_control: Whether its dtype can hold the control block without loss.
        slice_numel: Elements of each of its equal slices; all gradients where it is not cut.
    """

    grads: Tensor
    not_early: Tensor
    flags: Tensor
    control: Tensor

    def __init__(
        self,
        index: int,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        device: torch.device,
        slicing: Slicing = UNCUT,
    ) -> None:
        self.index = index
        for slot in slots:
            large = slot.numel * dtype.itemsize >= COPY_EARLY_BYTES
            same = slot.param.dtype.to_real() == dtype
            slot.copy_early = device.type == "cpu" and large and same and not slot.is_complex
        # Those first: they are scaled one by one, the rest of the memory in one call.
        self.slots = sorted(slots, key=lambda slot: not slot.copy_early)
        self.early_slots = [slot.copy_early for slot in slots].count(True)
        self.dtype = dtype
        self.device = device
        self.deferred = any(slot.deferred for slot in slots)
        self.pending = 0
        self.is_last = False  # of the buckets that are sent together; set at launch
        self.ready = 0.0  # when the last gradient arrived
        self.unused: list[int] = []  # positions without a local gradient, set at launch
        self.flat: Tensor | None = None
        self._gaps: Tensor | None = None
        self.strides = [_strides(slot.param) for slot in self.slots]
        self.shapes = [slot.param.shape for slot in self.slots]
        self.same_dtype = [slot.param.dtype.to_real() == dtype for slot in self.slots]
        self._give_places(slicing)
        # New memory means new views, which cost a call each: worth it where they cover much.
        self.worth_releasing = self.nbytes >= RELEASE_BYTES * len(self.slots)

    def _give_places(self, slicing: Slicing) -> None:
        """Work out where in the bucket's memory each slot, the flags and the control block lie."""
        dtype = self.dtype
        align = slicing.align(dtype)
        self.offsets: list[int] = []
        offset = 0
        for slot in self.slots:
            slot.bucket = self
            self.offsets.append(offset)
            offset += -(-slot.numel // align) * align
        self.grad_numel = offset = slicing.padded(offset, dtype)
        self.slice_numel = offset // slicing.count
        self.early_numel = [*self.offsets, offset][self.early_slots]
        self.carries_control = dtype in (torch.float32, torch.float64)
        self.numel = offset + len(self.slots) + (CONTROL_SIZE if self.carries_control else 0)
        self.slots_numel = sum(slot.numel for slot in self.slots)
        ends = zip(self.offsets, self.slots, [*self.offsets[1:], self.grad_numel], strict=True)
        self.gaps = [
            (begin + slot.numel, end) for begin, slot, end in ends if begin + slot.numel < end
        ]
        self.gaps.append((self.grad_numel, self.numel))

    def clear_gaps(self) -> None:
        """Zero what lies between gradients, once more: a block that is not finite was written over it."""
        self.allocate()
        if self._gaps is None:
            ranges = [torch.arange(begin, end, device="cpu") for begin, end in self.gaps[:-1]]
            self._gaps = torch.cat([torch.arange(0, device="cpu"), *ranges]).to(self.device)
        self.grads.index_fill_(0, self._gaps, 0.0)

    def keep_slice(self, rank: int) -> None:
        """Set what rank ``rank`` does not own to zero: what is there means nothing."""
        self.grads[: rank * self.slice_numel].zero_()
        self.grads[(rank + 1) * self.slice_numel :].zero_()

    @property
    def sliced(self) -> bool:
        """Whether the optimizers of its parameters work on slices of it."""
        return self.slots[0].sliced

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, which are those of a message."""
        return self.numel * self.dtype.itemsize

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [slot.name for slot in self.slots]

    def allocate(self) -> Tensor:
        """Return the storage, made when there is none; what ``copy_in`` does not write is zero.

        Raises:
            ConfigError: A parameter has another shape than when its place was planned.
        """
        if self.flat is None:
            for slot, shape in zip(self.slots, self.shapes, strict=True):
                if slot.param.shape != shape:
                    raise changed_shape(slot, shape)
            flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            for begin, end in self.gaps:
                flat[begin:end].zero_()
            for slot, offset, strides, same in zip(
                self.slots, self.offsets, self.strides, self.same_dtype, strict=True
            ):
                slot.view, slot.grad_view = _views(flat, slot, offset, strides, same)
            flags_end = self.grad_numel + len(self.slots)
            self.grads = flat[: self.grad_numel]
            self.not_early = flat[self.early_numel : self.grad_numel]
            self.flags = flat[self.grad_numel : flags_end]
            self.control = flat[flags_end:]
            self.flat = flat
            self._references = self._count_references()
        return self.flat

    def _count_references(self) -> list[int]:
        assert self.flat is not None
        views = (slot.grad_view for slot in self.slots)
        return [storage_uses(self.flat), *(sys.getrefcount(v) for v in views if v is not None)]

    def should_release(self) -> bool:
        """Whether the next backward had better begin with new memory.

        That is so where it is cheap, and where somebody kept a gradient of an earlier step (``g =
        p.grad``, or a view of it): it must keep its values, as on one device.
        """
        if self.flat is None:
            return False
        return self.worth_releasing or self._count_references() != self._references

    def release(self) -> bool:
        """Give the storage back if no parameter's gradient is in it; return whether it did.

        Only references are dropped: a view that somebody else kept stays valid.
        """
        if self.flat is None:
            return False
        if any(s.grad_view is not None and s.param.grad is s.grad_view for s in self.slots):
            return False
        self.abandon()
        return True

    def abandon(self) -> None:
        """Leave the storage to whoever still uses it: a collective that nobody waits for any more."""
        if self.flat is None:
            return
        for slot in self.slots:
            slot.view = slot.grad_view = None
        self.flat = None
        del self.grads, self.not_early, self.flags, self.control


def changed_shape(slot: Slot, shape: torch.Size) -> ConfigError:
    """Return the error for a parameter whose ``.data`` was exchanged."""
    return ConfigError(
        f"parameter {slot.name} has shape {tuple(slot.param.shape)} and had {tuple(shape)} when"
        " its gradient's place was planned. Assign a new nn.Parameter to the module in place of another"
        " tensor to param.data; it is taken in at the next epoch, or when an optimizer gets a group."
    )


def _views(
    flat: Tensor, slot: Slot, offset: int, strides: tuple[int, ...], same: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the slot's view into the bucket and the view that ``param.grad`` becomes."""
    same = same and not slot.removed
    if slot.param.is_complex():
        real = flat[offset : offset + slot.numel].view(*slot.param.shape, 2)
        return real, torch.view_as_complex(real) if same else None
    view = flat.as_strided(slot.param.shape, strides, offset)
    return view, view if same else None


def _strides(param: Tensor) -> tuple[int, ...]:
    return param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor``'s elements fill one block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
