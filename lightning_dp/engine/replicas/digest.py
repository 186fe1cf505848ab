"""Proof that replicas are identical: 8 bytes a rank, compared now and then."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.engine.replicas.packing import chunks, pack
from lightning_dp.errors import ReplicaMismatchError, some_names

log = logging.getLogger(__name__)

_MIX = 6364136223846793005  # Knuth's MMIX multiplier: makes a sum depend on the position
_ROW = 2**15  # words: a chunk of bytes is looked at as rows of this length


class Summary(NamedTuple):
    """What is compared, by parameter; sent only after the 8 bytes differed.

    Attributes:
        settings: Of the optimizers, by name.
        names: Of all parameters.
        trainable: Which of them require a gradient.
        values: A digest of each one's bytes.
        layout: Parameter numbers by bucket.
    """

    settings: dict[str, Any]
    names: list[str]
    trainable: list[bool]
    values: list[int]
    layout: list[list[int]]


def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a 64-bit digest of the tensors' elements in logical order, shape ``()``, on ``device``.

    A sum of the words, each times an odd pseudo-random number of its place, modulo 2**64. One changed
    bit always changes it; moved elements and constant tensors differ too, which an exclusive or
    (``torch.hash_tensor``) does not see. A few kernels for each 64 MiB.
    """
    weights = place_weights(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunk in chunks(tensors):
        rows = pack(chunk, device, multiple=8 * _ROW).view(torch.int64).view(-1, _ROW)
        sums = (rows * weights).sum(dim=1)
        total = total * _MIX + (sums * weights[: len(sums)]).sum()
    return total


def place_weights(device: torch.device) -> Tensor:
    """Return the numbers that places are multiplied with: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(_MIX % 2**31)
    empty = torch.empty(_ROW, dtype=torch.int64, device="cpu")
    return (empty.random_(-(2**63), 2**63 - 1, generator=generator) | 1).to(device)


def check_replicas(
    reducer: Reducer,
    step: int,
    on_mismatch: str = "raise",
    settings: Mapping[str, Any] | None = None,
) -> bool:
    """Compare all replicas' parameters, trainable masks, bucket layouts and optimizer settings.

    Args:
        reducer: Whose parameters.
        step: The optimizer step, for the message.
        on_mismatch: ``"raise"``, or ``"rebroadcast"`` to go on from rank 0's values. That mends values
            only (optimizer state that differs would drive them apart again, and is seen then); a
            difference in anything else always raises.
        settings: Learning rates and whatever else must be equal, by name.

    Returns:
        Whether all were equal.

    Raises:
        ReplicaMismatchError: Names the first things that differ and the ranks.

    Collective: every rank, between two steps. Blocks; the host waits for the device.
    """
    group: ReplicaGroup = reducer.group
    if group.world_size == 1:
        return True
    slots = [slot for slot in reducer.registry.slots if not slot.removed]
    parameters = [slot.param for slot in slots]
    summary = Summary(
        settings=dict(settings or {}),
        names=[slot.name for slot in slots],
        trainable=[parameter.requires_grad for parameter in parameters],
        values=[int(digest(parameters, group.device))],
        layout=reducer.layout.signature,
    )
    total = hashlib.sha256(repr(summary).encode()).digest()[:8]
    if len(set(group.all_gather_object(total))) == 1:
        return True
    summary = summary._replace(values=[int(digest([p], group.device)) for p in parameters])
    _explain(group, group.all_gather_object(summary), step, on_mismatch)
    replicas.broadcast(parameters, group)
    return False


def _explain(group: ReplicaGroup, everyone: list[Summary], step: int, on_mismatch: str) -> None:
    """Say what differs; raise unless it can be, and shall be, mended by a broadcast."""
    first = everyone[0]
    for field, what in (
        ("settings", ""),
        ("names", "the set of parameters differs"),
        ("trainable", "requires_grad differs"),
        ("layout", "the bucket layout differs"),
        ("values", "the values differ"),
    ):
        mine = repr(getattr(first, field))  # NaN is equal to itself in it
        ranks = [r for r, other in enumerate(everyone) if repr(getattr(other, field)) != mine]
        if not ranks:
            continue
        where = f"[rank {group.rank}] replicas are no longer identical at optimizer step {step}: "
        if field == "settings":
            raise _settings_differ(where, [each.settings for each in everyone], ranks)
        names = _differing(first, [everyone[rank] for rank in ranks], field)
        message = (
            f"{where}{what} for {some_names(names) if names else 'all parameters'} on rank(s) {ranks},"
            " compared with rank 0. Something changed them on one rank only (a step under"
            " `if rank == 0`, an optimizer that steps before gradients are averaged, an unseeded"
            " re-initialisation, a parameter replaced or frozen by hand)."
        )
        if on_mismatch == "raise" or field != "values":
            raise ReplicaMismatchError(message, names=names, ranks=ranks)
        if group.rank == 0:
            log.warning("%s Going on from rank 0's values.", message)


def _settings_differ(
    where: str, everyone: list[dict[str, Any]], ranks: list[int]
) -> ReplicaMismatchError:
    """Name the settings that differ, and their values by rank."""
    names = [
        name
        for name in dict.fromkeys(name for settings in everyone for name in settings)
        if len({repr(settings.get(name)) for settings in everyone}) > 1
    ]
    values = {rank: settings.get(names[0]) for rank, settings in enumerate(everyone)}
    return ReplicaMismatchError(
        f"{where}{some_names(names)} differ; {names[0]} by rank: {values}. A scheduler that follows a"
        " value which each rank computes for itself (ReduceLROnPlateau) is the usual cause: log what it"
        " monitors with `self.log(..., sync_dist=True)`; set by hand, set it on every rank.",
        names=names,
        ranks=ranks,
    )


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
