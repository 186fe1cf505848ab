"""Replicas begin equal: compare what the ranks hold, name the first difference, then broadcast."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.registry import (
    buffer_owners,
    named_buffers,
    named_parameters,
    refuse_unusable,
)
from lightning_dp.engine.replicas.packing import chunks, pack, plain_parts, unpack
from lightning_dp.errors import ReplicaMismatchError, some_names
from lightning_dp.internals.autograd import ignored_names, non_persistent_buffers

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """What must be equal on all ranks of one parameter or buffer.

    Attributes:
        stored_as: What its values are made of, where they are not one dense tensor of its own shape.
        cached: A non-persistent buffer: may differ between ranks, and is left alone then.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    tied_to: str
    stored_as: str
    cached: bool


def describe(module: nn.Module) -> list[Entry]:
    """Return an entry for each parameter and buffer, ties of parameters resolved to the first name."""
    ignored = ignored_names(module)
    first: dict[int, str] = {}
    entries = []
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            tied_to = first.setdefault(id(tensor), name)
            entries.append(_entry(name, "parameter", tensor, tied_to if tied_to != name else ""))
    return entries + describe_buffers(module)


def describe_buffers(module: nn.Module) -> list[Entry]:
    """Return an entry for each buffer, a tied one under its first name."""
    return [
        _entry(name, "buffer", owner.get_buffer(key), cached=key in non_persistent_buffers(owner))
        for name, (owner, key) in buffer_owners(module).items()
    ]


def _entry(name: str, kind: str, tensor: Tensor, tied_to: str = "", cached: bool = False) -> Entry:
    parts = plain_parts(tensor)
    stored_as = ""
    if parts is None:
        stored_as = f"{type(tensor).__name__}, {tensor.layout}"
    elif [part.shape for part in parts] != [tensor.shape] or parts[0].dtype != tensor.dtype:
        stored_as = str([(part.dtype, tuple(part.shape)) for part in parts])
    return Entry(
        name=name,
        kind=kind,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        requires_grad=kind == "parameter" and tensor.requires_grad,
        tied_to=tied_to,
        stored_as=stored_as,
        cached=cached,
    )


def compare(module: nn.Module, group: ReplicaGroup) -> set[str]:
    """Check that all ranks hold the same parameters and buffers, in the same order.

    Returns:
        Non-persistent buffers that differ in size or are missing on some rank (caches: masks, tables of
        positions); each rank keeps its own.

    Raises:
        ReplicaMismatchError: On every rank, naming the first difference and the ranks that have it.

    Collective: every rank. Blocks; 32 bytes a rank when all is well.
    """
    if group.world_size == 1:
        return set()
    entries = describe(module)
    digests = group.all_gather_object(hashlib.sha256(repr(entries).encode()).digest())
    if len(set(digests)) == 1:
        return set()
    return unequal_caches(group.all_gather_object(entries), group.rank)


def unequal_caches(everyone: Sequence[Sequence[Entry]], rank: int) -> set[str]:
    """Return the names of cached buffers that are not the same on all ranks.

    Args:
        everyone: Every rank's entries.
        rank: This one, for the message.

    Raises:
        ReplicaMismatchError: Anything else differs.
    """
    lasting = [[entry for entry in entries if not entry.cached] for entries in everyone]
    ranks = [other for other, entries in enumerate(lasting) if entries != lasting[0]]
    if ranks:
        what, name = _first_difference(lasting[0], lasting[ranks[0]], ranks[0])
        raise ReplicaMismatchError(
            f"[rank {rank}] the module differs between ranks: {what}. Ranks that differ from rank 0:"
            f" {ranks}. Build the same module, in the same order and with the same frozen parameters, on"
            " every rank (a branch on the rank, or an unseeded choice, is the usual cause).",
            names=[name],
            ranks=ranks,
        )
    caches: list[set[Entry]] = [
        {entry for entry in entries if entry.cached} for entries in everyone
    ]
    first, *others = caches
    return {entry.name for entry in first.union(*others) - first.intersection(*others)}


def _first_difference(
    reference: Sequence[Entry], other: Sequence[Entry], rank: int
) -> tuple[str, str]:
    for ours, theirs in zip(reference, other, strict=False):
        if ours == theirs:
            continue
        if ours.name != theirs.name:
            return f"rank 0 has {ours.name!r} where rank {rank} has {theirs.name!r}", ours.name
        for field, left, right in zip(Entry._fields, ours, theirs, strict=True):
            if left != right:
                return (
                    f"{ours.kind} {ours.name!r} has {field} {left!r} on rank 0 and {right!r} on rank"
                    f" {rank}",
                    ours.name,
                )
    longer, who = (reference, 0) if len(reference) > len(other) else (other, rank)
    extra = longer[min(len(reference), len(other))]
    return f"only rank {who} has {extra.kind} {extra.name!r}", extra.name


def warn_left_alone(names: Iterable[str], why: str, group: ReplicaGroup) -> None:
    """Say on rank 0 which tensors are not made equal."""
    shown = sorted(names)
    if shown and group.rank == 0:
        log.warning("lean_ddp: %s %s: each rank keeps its own.", some_names(shown), why)


CACHES_DIFFER = "are non-persistent buffers of another size on some rank (caches)"
NO_BYTES = "are stored in a way that cannot be sent (sparse, quantised or an opaque subclass)"


def broadcast(tensors: Iterable[Tensor], group: ReplicaGroup) -> None:
    """Overwrite ``tensors`` with rank 0's, in place and in few messages.

    Args:
        tensors: Any shapes, dtypes and devices, the same on every rank. What has no ``plain_parts`` is
            left alone.
        group: Who takes part.

    Collective: every rank, same tensors in the same order. Blocks (on CUDA: the stream only).
    """
    if group.world_size == 1:
        return
    for chunk in chunks(tensors):
        flat = pack(chunk, group.device)
        group.broadcast(flat)
        if group.rank != 0:  # its values are the ones; a copy would only bump version counters
            unpack(flat, chunk)


def synchronize(module: nn.Module, group: ReplicaGroup) -> set[str]:
    """Make all replicas equal to rank 0's.

    Returns:
        Names of what is left alone.

    Raises:
        ConfigError: A parameter is lazy, meta, a DTensor or on another device.
        ReplicaMismatchError: The ranks do not hold the same module.

    Collective: every rank, at start and when parameters were added. Blocks.
    """
    parameters = named_parameters(module)
    refuse_unusable(parameters, group.device)
    caches = compare(module, group)
    warn_left_alone(caches, CACHES_DIFFER, group)
    buffers = {n: each for n, each in sorted(named_buffers(module).items()) if n not in caches}
    tensors = {**parameters, **buffers}
    opaque = {name for name, tensor in tensors.items() if plain_parts(tensor) is None}
    if group.world_size > 1:
        warn_left_alone(opaque, NO_BYTES, group)
    broadcast(tensors.values(), group)
    return caches | opaque
