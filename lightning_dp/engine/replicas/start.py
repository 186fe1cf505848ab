"""Replicas begin equal: compare what the ranks hold, name the first difference, then broadcast."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_dp.engine.bucket import is_dense
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.registry import (
    named_buffers,
    named_parameters,
    refuse_unusable,
)
from lightning_dp.errors import ReplicaMismatchError
from lightning_dp.internals.autograd import ignored_names

CHUNK_BYTES = 64 * 2**20


class Entry(NamedTuple):
    """What must be equal on all ranks of one parameter or buffer."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    tied_to: str


def describe(module: nn.Module) -> list[Entry]:
    """Return an entry for each parameter and buffer, ties resolved to the first name."""
    ignored = ignored_names(module)
    first: dict[int, str] = {}
    entries = []
    for kind, pairs in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in pairs:
            if name in ignored:
                continue
            tied_to = first.setdefault(id(tensor), name)
            entries.append(
                Entry(
                    name=name,
                    kind=kind,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype),
                    requires_grad=tensor.requires_grad,
                    tied_to="" if tied_to == name else tied_to,
                )
            )
    return entries


def compare(module: nn.Module, group: ReplicaGroup) -> None:
    """Check that all ranks hold the same parameters and buffers, in the same order.

    Raises:
        ReplicaMismatchError: On every rank, naming the first difference and the ranks that have it.

    Collective: every rank. Blocks; 32 bytes a rank when all is well.
    """
    if group.world_size == 1:
        return
    entries = describe(module)
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    digests = group.all_gather_object(digest)
    if len(set(digests)) == 1:
        return
    everyone: list[list[Entry]] = group.all_gather_object(entries)
    ranks = [rank for rank, other in enumerate(digests) if other != digests[0]]
    what, name = _first_difference(everyone[0], everyone[ranks[0]], ranks[0])
    raise ReplicaMismatchError(
        f"[rank {group.rank}] the module differs between ranks: {what}. Ranks that differ from rank 0:"
        f" {ranks}. Build the same module, in the same order and with the same frozen parameters, on"
        " every rank (a branch on the rank, or an unseeded choice, is the usual cause).",
        names=[name],
        ranks=ranks,
    )


def _first_difference(reference: list[Entry], other: list[Entry], rank: int) -> tuple[str, str]:
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


def broadcast(tensors: Iterable[Tensor], group: ReplicaGroup) -> None:
    """Overwrite ``tensors`` with rank 0's, in place and in few messages.

    Args:
        tensors: Any shapes and dtypes, the same on every rank.
        group: Who takes part.

    Collective: every rank, same tensors in the same order. Blocks (on CUDA: the stream only).
    """
    if group.world_size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(_without_overlap(tensor.detach()))
    for group_of_one_dtype in by_dtype.values():
        chunk: list[Tensor] = []
        for tensor in group_of_one_dtype:
            chunk.append(tensor)
            if sum(t.numel() * t.element_size() for t in chunk) >= CHUNK_BYTES:
                _broadcast_chunk(chunk, group)
                chunk = []
        if chunk:
            _broadcast_chunk(chunk, group)


def _broadcast_chunk(tensors: list[Tensor], group: ReplicaGroup) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wire = torch.view_as_real(flat) if flat.is_complex() else flat
    group.broadcast(wire)
    if group.rank == 0:
        return  # its values are the ones; a copy would only bump version counters
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        with torch.inference_mode(tensor.is_inference()):  # outside, those refuse to be written
            tensor.copy_(part.view(tensor.shape))


def _without_overlap(tensor: Tensor) -> Tensor:
    """Of an expanded tensor, the elements that really exist: the rest share their memory."""
    if is_dense(tensor):
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def synchronize(module: nn.Module, group: ReplicaGroup) -> None:
    """Make all replicas equal to rank 0's.

    Raises:
        ConfigError: A parameter is lazy, meta, a DTensor or on another device.
        ReplicaMismatchError: The ranks do not hold the same module.

    Collective: every rank, at start and when parameters were added. Blocks.
    """
    refuse_unusable(named_parameters(module), group.device)
    compare(module, group)
    tensors = [*named_parameters(module).values(), *named_buffers(module).values()]
    broadcast(tensors, group)
