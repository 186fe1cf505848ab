"""Bring back together what ranks hold different numbers of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.errors import ConfigError

_FLOAT32_INTEGERS = 2**24


def reduce_exactly(tensor: Tensor, reduce_op: Any, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce ``tensor``, without rounding the mean of integers to an integer.

    Lightning counts samples in integers and divides a float32 sum by their mean over ranks; both gloo and
    NCCL round that mean. It is taken in float64 here. Where float32 can hold the sum, the result is
    float32 as the other one: both means are then rounded alike, and a constant stays what it is.

    Args:
        tensor: Any shape and dtype.
        reduce_op: Name or operation.
        reduce: Reduces over ranks.

    Collective: as ``reduce``.
    """
    named = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if not whole or named not in ("mean", "avg", dist.ReduceOp.AVG):
        return reduce(tensor)
    if tensor.device.type == "mps":  # has no float64
        return reduce(tensor.to(torch.float32))
    mean = reduce(tensor.to(torch.float64))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    fits = bool((mean.abs() * ranks <= _FLOAT32_INTEGERS).all())  # the same on every rank
    return mean.to(torch.float32) if fits else mean


def members(group: Any, everyone: ReplicaGroup) -> ReplicaGroup:
    """Return who takes part in a user's collective over ``group`` (``None`` or the world: all ranks)."""
    if group is None or group is dist.group.WORLD:
        return everyone
    size = dist.get_world_size(group)
    return ReplicaGroup(group, dist.get_rank(group), size, everyone.device)


def pad_to_largest(tensor: Tensor, group: ReplicaGroup) -> tuple[Tensor, list[torch.Size]]:
    """Pad ``tensor`` with zeros at the end of each dimension to the largest of all ranks.

    Args:
        tensor: Any shape; the number of dimensions must be the same on all ranks.
        group: Who takes part.

    Raises:
        ConfigError: The number of dimensions differs.

    Collective: every rank. Blocks.
    """
    shapes = [torch.Size(shape) for shape in group.all_gather_object(tuple(tensor.shape))]
    if len({len(shape) for shape in shapes}) > 1:
        raise ConfigError(
            f"all_gather of tensors with different numbers of dimensions: {[tuple(s) for s in shapes]} by"
            " rank."
        )
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padding: list[int] = []
    for size, most in zip(reversed(tensor.shape), reversed(largest), strict=True):
        padding += [0, most - size]
    return (functional.pad(tensor, padding) if any(padding) else tensor), shapes


class _AllGather(torch.autograd.Function):
    """Each rank's tensor, stacked; a gradient goes back to the rank whose tensor it is of, summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _stacked(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = grads[0].clone(memory_format=torch.contiguous_format)  # the given one may be shared
        interruptible_wait(
            dist.all_reduce(whole, group=ctx.group, async_op=True), on_host=_on_host(whole)
        )
        return whole[dist.get_rank(ctx.group)], None


def all_gather(tensor: Tensor, group: Any, *, sync_grads: bool) -> Tensor:
    """Return every rank's ``tensor``, stacked by rank: shape ``(ranks, ...)``.

    As Lightning's own, which uses a function that torch has deprecated.

    Args:
        tensor: The same shape and dtype on every rank.
        group: Who takes part; ``None`` or Lightning's "all ranks" for the default group.
        sync_grads: Whether gradients flow back, each to the rank that gave the tensor.

    Collective: every rank of ``group``; with ``sync_grads`` its backward too. Blocks.
    """
    if not dist.is_initialized():
        return tensor
    members = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if sync_grads:
        gathered: Tensor = _AllGather.apply(tensor, members)  # type: ignore[no-untyped-call]
        return gathered
    with torch.no_grad():
        return _stacked(tensor, members)


def _stacked(tensor: Tensor, group: Any) -> Tensor:
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    work = dist.all_gather(list(gathered), tensor.contiguous(), group=group, async_op=True)
    interruptible_wait(work, on_host=_on_host(tensor))
    return gathered


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def gather_rows(rows: Tensor, indices: Sequence[Any], group: ReplicaGroup) -> Tensor:
    """Return the rows of all ranks, sorted by ``indices``, each index once.

    Args:
        rows: Shape ``(n, ...)``; ``n`` may differ between ranks.
        indices: The dataset index of each row; empty if unknown, then rows stay in the order of ranks.
        group: Who takes part; of the CPU.

    Returns:
        Shape ``(all rows, ...)``, on the device of ``rows``.

    Collective: every rank. Blocks.
    """
    plain = all(isinstance(index, int) for index in indices)
    sent = group.all_gather_object(list(indices) if plain else [])
    known = [index for own in sent for index in own]
    # The small group is of the CPU; anything else travels as the user's own all_gather would.
    padded, shapes = pad_to_largest(rows, group)
    members = group.process_group if _on_host(rows) else None
    parts = all_gather(padded, members, sync_grads=False) if group.world_size > 1 else [padded]
    gathered = torch.cat([part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)])
    if len(known) != len(gathered):
        return gathered
    order = torch.tensor(known, dtype=torch.int64)
    order, places = torch.sort(order, stable=True)
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = order[1:] != order[:-1]  # a repeated sample counts once
    return gathered[places[first].to(gathered.device)]


def merge_batches(
    predictions: list[Any], indices: list[list[Any]] | None, group: ReplicaGroup
) -> list[Any]:
    """Return the predictions of all ranks in the order of the dataset, as batches.

    Predictions that can be taken apart into samples (tensors, lists, and dictionaries or tuples of them,
    with one entry for each sample) are put together again in batches of the largest size seen. Others
    stay whole, ordered by the first index of their batch. Without indices, ranks follow each other.

    Args:
        predictions: One entry for each batch of this rank.
        indices: The dataset indices of each batch, or ``None``.
        group: Who takes part.

    Collective: every rank. Blocks.
    """
    sent = group.all_gather_object((predictions, indices))
    if any(known is None for _, known in sent):
        return [batch for batches, _ in sent for batch in batches]
    pairs = [pair for batches, known in sent for pair in zip(known, batches, strict=True)]
    samples: list[tuple[Any, Any]] = []
    for known, batch in pairs:
        apart = split_samples(batch, len(known))
        if apart is None:
            return [batch for _, batch in sorted(pairs, key=lambda pair: pair[0][:1])]
        samples += zip(known, apart, strict=True)
    samples.sort(key=lambda sample: sample[0])
    size = max((len(known) for known, _ in pairs), default=1)
    values = [value for _, value in samples]
    return [join_samples(values[at : at + size]) for at in range(0, len(values), size)]


def split_samples(batch: Any, count: int) -> list[Any] | None:
    """Take a batch of predictions apart into ``count`` samples; ``None`` if that is not possible."""
    if isinstance(batch, Tensor):
        return list(batch) if batch.dim() and len(batch) == count else None
    if isinstance(batch, Mapping):
        columns = _columns(list(batch.values()), count)
        keys = list(batch)
        return columns and [dict(zip(keys, row, strict=True)) for row in columns]
    if isinstance(batch, (list, tuple)):
        if all(isinstance(value, (Tensor, Mapping)) for value in batch):
            columns = _columns(list(batch), count)
            if columns is not None:
                return columns
        return list(batch) if len(batch) == count else None
    return None


def _columns(values: list[Any], count: int) -> list[Any] | None:
    """Take several values apart at once: one tuple for each sample."""
    apart = [column for value in values if (column := split_samples(value, count)) is not None]
    if not values or len(apart) != len(values):
        return None
    return list(zip(*apart, strict=True))


def join_samples(samples: list[Any]) -> Any:
    """Put samples together as :func:`split_samples` found them."""
    first = samples[0]
    if isinstance(first, Tensor):
        same = all(value.shape == first.shape for value in samples)
        return torch.stack(samples) if same else samples
    if isinstance(first, Mapping):
        return {key: join_samples([value[key] for value in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(join_samples(list(column)) for column in zip(*samples, strict=True))
    return samples
