"""Proof that replicas are identical: 8 bytes a rank, compared now and then."""

from __future__ import annotations

import hashlib
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dp.engine.bucket import Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.errors import ReplicaMismatchError, some_names

log = logging.getLogger(__name__)

_MIX = 6364136223846793005  # Knuth's MMIX multiplier: makes a sum depend on the position
_CHUNK = 2**15  # words that are weighted at a time: bounds the memory
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Summary(NamedTuple):
    """What is compared, by parameter; sent only after the 8 bytes differed.

    Attributes:
        names: Of all parameters.
        trainable: Which of them require a gradient.
        values: A digest of each one's bytes.
        layout: Parameter numbers by bucket.
    """

    names: list[str]
    trainable: list[bool]
    values: list[int]
    layout: list[list[int]]


def digest(tensor: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return a 64-bit digest of ``tensor``'s elements in logical order, shape ``()``, on its device.

    A sum of the words, each times an odd pseudo-random number of its place, modulo 2**64. One changed
    bit always changes it; moved elements and constant tensors differ too, which an exclusive or
    (``torch.hash_tensor``) does not see.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    words = flat.contiguous().view(_WORDS[flat.element_size()])
    weights = place_weights(flat.device) if weights is None else weights
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in torch.split(words, _CHUNK):
        total = total * _MIX + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total


def place_weights(device: torch.device) -> Tensor:
    """Return the numbers that places are multiplied with: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(_MIX % 2**31)
    bits = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=generator, dtype=torch.int64)
    return (bits | 1).to(device)


def check_replicas(reducer: Reducer, step: int, on_mismatch: str = "raise") -> bool:
    """Compare all replicas' parameters, trainable masks and bucket layouts.

    Args:
        reducer: Whose parameters.
        step: The optimizer step, for the message.
        on_mismatch: ``"raise"``, or ``"rebroadcast"`` to go on from rank 0's values. That mends values
            only (optimizer state that differs would drive them apart again, and is seen then); a
            difference in what is trainable always raises.

    Returns:
        Whether all were equal.

    Raises:
        ReplicaMismatchError: Names the first parameters that differ and the ranks.

    Collective: every rank, between two steps. Blocks; the host waits for the device.
    """
    group: ReplicaGroup = reducer.group
    if group.world_size == 1:
        return True
    slots = [slot for slot in reducer.registry.slots if not slot.removed]
    weights = place_weights(group.device)
    values = [digest(slot.param, weights) for slot in slots]
    mine = torch.stack(values).tolist() if values else []
    summary = _summary(reducer, slots, mine)
    total = hashlib.sha256(repr(summary).encode()).digest()[:8]
    if len(set(group.all_gather_object(total))) == 1:
        return True
    _explain(group, group.all_gather_object(summary), step, on_mismatch)
    replicas.broadcast([slot.param for slot in slots], group)
    return False


def _summary(reducer: Reducer, slots: list[Slot], values: list[int]) -> Summary:
    return Summary(
        names=[slot.name for slot in slots],
        trainable=[slot.param.requires_grad for slot in slots],
        values=values,
        layout=reducer.layout.signature,
    )


def _explain(group: ReplicaGroup, everyone: list[Summary], step: int, on_mismatch: str) -> None:
    """Say what differs; raise unless it can be, and shall be, mended by a broadcast."""
    first = everyone[0]
    for field, what in (
        ("names", "the set of parameters differs"),
        ("trainable", "requires_grad differs"),
        ("layout", "the bucket layout differs"),
        ("values", "the values differ"),
    ):
        ranks = [
            r for r, other in enumerate(everyone) if getattr(other, field) != getattr(first, field)
        ]
        if not ranks:
            continue
        names = _differing(first, [everyone[rank] for rank in ranks], field)
        message = (
            f"[rank {group.rank}] replicas are no longer identical at optimizer step {step}: {what} for"
            f" {some_names(names) if names else 'all parameters'} on rank(s) {ranks}, compared with rank"
            " 0. Something changed them on one rank only (a step under `if rank == 0`, an unseeded"
            " re-initialisation, a parameter replaced or frozen by hand)."
        )
        if on_mismatch == "raise" or field != "values":
            raise ReplicaMismatchError(message, names=names, ranks=ranks)
        if group.rank == 0:
            log.warning("%s Going on from rank 0's values.", message)


def _differing(first: Summary, others: list[Summary], field: str) -> list[str]:
    if field == "layout":
        return []
    if field == "names":
        sets = [set(first.names) ^ set(other.names) for other in others]
        return sorted(set().union(*sets)) or first.names[:1]
    mine = getattr(first, field)
    return [
        name
        for place, name in enumerate(first.names)
        if any(getattr(other, field)[place] != mine[place] for other in others)
    ]
