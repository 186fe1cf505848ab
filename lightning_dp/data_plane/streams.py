"""Training loaders whose batches are not ours: data that only yields, and loaders sharded by the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_dp.data.draw import sized
from lightning_dp.data.iterable import EpochSampler, shard_iterable
from lightning_dp.data.join import join_ends
from lightning_dp.data.loader import LoaderParts, copy_loader, is_stateful
from lightning_dp.data_plane.common import Ranks, divide_batch
from lightning_dp.data_plane.exchange import GroupJoin
from lightning_dp.errors import UnevenShardError


def is_stream(loader: Any) -> bool:
    """Whether ``loader`` is a DataLoader over an iterable dataset."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def prepare_stream(
    loader: Any,
    ranks: Ranks,
    trained: Callable[[], int],
    keep: int,
    *,
    training: bool,
    state: Any = None,
) -> Any:
    """Return what to iterate over in the place of ``loader``.

    Args:
        loader: A loader that we give no batch sampler.
        ranks: Who shares the data, and how.
        trained: Returns how many batches were trained so far.
        keep: How many batches back a stateful loader's state must be known.
        training: Whether all ranks must make equal steps.
        state: Given to a stateful loader when its first pass begins.

    Raises:
        UnevenShardError: Lengths differ between ranks, and that is an error.

    Collective: every rank, for each loader in turn. Blocks.
    """
    options = ranks.options
    name = type(getattr(loader, "dataset", loader)).__name__  # the user's, before it is shared
    advice = _advice(loader, ranks)
    if is_stream(loader) and (targets := LoaderParts.of(loader).epoch_targets):
        loader = copy_loader(loader, sampler=EpochSampler(loader.sampler, targets))
    if is_stream(loader) and not ranks.hands_off:
        if options.batch_size == "global" and loader.batch_size is not None:
            loader = _with_batch_size(loader, divide_batch(loader.batch_size, ranks.world_size))
        if options.iterable == "shard":
            shard = ranks.shard
            loader = shard_iterable(loader, shard.rank, shard.world_size, equal=training)
    if not training:
        return loader
    length = _common_length(loader, ranks, name, advice)
    by_user = isinstance(loader, DataLoader) and not is_stream(loader)
    join = None
    if ranks.world_size > 1 and not (by_user and length is None):  # else all know the length
        same_data = "off" if ranks.hands_off or by_user else options.iterable
        join = GroupJoin(ranks.group, options.uneven_train, same_data, name, advice)
    if join is None and not is_stateful(loader):
        return loader
    return join_ends(loader, trained, join, length, keep, state)


def _advice(loader: Any, ranks: Ranks) -> str:
    """What helps if this loader gives ranks different numbers of batches."""
    common = "choose uneven_train='min' to stop all ranks with the first"
    if not is_stream(loader) or ranks.hands_off:
        return f"Give all ranks the same number of batches, or {common}."
    if ranks.options.iterable == "shard":
        return (
            "iterable='shard' needs a dataset that yields the same items on every rank, and this one does"
            " not. Fix that; or, if it picks its own part on each rank, choose iterable='off' and let all"
            f" parts give the same number of batches; or {common}."
        )
    return (
        "Let the dataset yield the same number on every rank; or let it yield everything on every rank and"
        f" choose iterable='shard', which shares it evenly; or {common}."
    )


def _common_length(loader: Any, ranks: Ranks, name: str, advice: str) -> int | None:
    """Compare lengths; return the least where they differ and that is allowed."""
    lengths = ranks.group.all_gather_object(sized(loader))
    if len(set(lengths)) == 1:
        return None
    least: int = min(length for length in lengths if length is not None)
    short = [rank for rank, length in enumerate(lengths) if length == least]
    if ranks.options.uneven_train == "error":
        raise UnevenShardError(
            f"The training data ({name}) has another number of batches on each rank: {lengths} by rank."
            f" Rank(s) {short} would run out first, after {least}. {advice}",
            ranks=short,
        )
    return least


def _with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    entries: dict[str, Any] = {"batch_size": size}
    if type(loader.batch_sampler) is BatchSampler:
        entries["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
    return copy_loader(loader, **entries)
