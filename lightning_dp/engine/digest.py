"""Proof that replicas are identical: 8 bytes a rank, compared now and then."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dp.engine import replicas
from lightning_dp.engine.autograd_seams import hash_tensor
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reducer import Reducer
from lightning_dp.errors import ReplicaMismatchError, some_names

_MIX = 6364136223846793005  # Knuth's MMIX multiplier: makes the sum depend on the position


def digests(reducer: Reducer) -> Tensor:
    """Return one 64-bit digest a parameter, shape ``(num_parameters + 1,)``, int64, on the device.

    The last one stands for what is not a value: which parameters are trainable, and the layout.
    """
    slots = reducer.registry.slots
    shape = [(slot.index, slot.param.requires_grad) for slot in slots], reducer.layout.signature
    structure = int.from_bytes(_sha(repr(shape)), "big", signed=True)
    values = [hash_tensor(slot.param) for slot in slots]
    last = torch.tensor(structure, dtype=torch.int64, device=reducer.group.device)
    return torch.stack([*values, last])


def _sha(text: str) -> bytes:
    import hashlib

    return hashlib.sha256(text.encode()).digest()[:8]


def check_replicas(reducer: Reducer, step: int, on_mismatch: str = "raise") -> bool:
    """Compare all replicas' parameters, trainable masks and bucket layouts.

    Args:
        reducer: Whose parameters.
        step: The optimizer step, for the message.
        on_mismatch: ``"raise"``, or ``"rebroadcast"`` to go on from rank 0's values.

    Returns:
        Whether all were equal.

    Raises:
        ReplicaMismatchError: Names the first parameters that differ and the ranks.

    Collective: every rank, between two steps. Blocks; the host waits for the device.
    """
    group: ReplicaGroup = reducer.group
    if group.world_size == 1:
        return True
    mine = digests(reducer)
    places = torch.arange(1, mine.numel() + 1, device=mine.device)
    total = int((mine * (places * _MIX)).sum())
    totals = group.all_gather_object(total)
    if len(set(totals)) == 1:
        return True
    everyone = torch.tensor(group.all_gather_object(mine.tolist()))
    differs = (everyone != everyone[0]).any(dim=0).nonzero().flatten().tolist()
    ranks = (everyone != everyone[0]).any(dim=1).nonzero().flatten().tolist()
    slots = reducer.registry.slots
    names = [slots[place].name for place in differs if place < len(slots)]
    what = f"parameters {some_names(names)}" if names else "the set of trainable parameters"
    message = (
        f"[rank {group.rank}] replicas are no longer identical at optimizer step {step}: {what} differ"
        f" from rank 0's on rank(s) {ranks}. Something changed them on one rank only (a step under"
        " `if rank == 0`, an unseeded re-initialisation, or a parameter replaced by hand)."
    )
    if on_mismatch == "raise" or not names:
        raise ReplicaMismatchError(message, names=names, ranks=ranks)
    if group.rank == 0:
        import logging

        logging.getLogger(__name__).warning("%s Going on from rank 0's values.", message)
    replicas.broadcast([slot.param for slot in slots], group)
    return False
