"""What training and evaluation data have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_dp.data.content_hash import selection_hash
from lightning_dp.data.draw import sized
from lightning_dp.data.loader import LoaderParts, Shard, is_sharded_by_user
from lightning_dp.data_plane.exchange import OrderAgreement
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.errors import ConfigError
from lightning_dp.options import DataOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """Those who share the data, and how.

    Attributes:
        group: Who takes part; on the CPU.
        shard: This rank's place, and the run's seed.
        options: As the user chose.
        agree: Compares orders.
        hands_off: The user shards the data.
    """

    group: ReplicaGroup
    shard: Shard
    options: DataOptions
    agree: OrderAgreement
    hands_off: bool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.shard.world_size

    def shards(self, loader: Any) -> bool:
        """Whether ``loader`` is one that we give a batch sampler."""
        return (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and not self.hands_off
            and not is_sharded_by_user(loader)
        )

    def warn_or_raise(self, message: str, *, strict: bool | None = None) -> None:
        """Say it once, on rank 0; raise it on all ranks where the user asked for strictness.

        Raises:
            ConfigError: ``strict_data`` (or ``strict``).
        """
        if self.options.strict_data if strict is None else strict:
            raise ConfigError(message)
        if self.shard.rank == 0:
            log.warning("lean_ddp: %s", message)

    def parts(self, loader: DataLoader[Any], *, training: bool) -> LoaderParts:
        """Take a user's loader apart, with the batch size of one rank.

        Raises:
            ConfigError: The datasets of the ranks differ in length or in the indices they select, or a
                global batch size is not a multiple of the number of ranks.

        Collective: every rank, for each loader in turn. Blocks.
        """
        parts = LoaderParts.of(loader)
        self._compare(parts)
        if self.options.batch_size == "per_device":
            return parts
        return replace(parts, batch_size=self.rank_batch_size(parts, training=training))

    def rank_batch_size(self, parts: LoaderParts, *, training: bool) -> int:
        """Divide a loader's batch size, which counts for all ranks, by their number.

        Raises:
            ConfigError: It is not a multiple, or there is none because a batch sampler makes batches.
        """
        size, ranks = parts.batch_size, self.world_size
        if not training:  # the tail is shared anyway, and no gradient depends on it
            return max(1, -(-size // ranks))
        if parts.source.batches:
            raise ConfigError(
                f"batch_size='global' cannot divide what {parts.source.name} makes: it decides itself"
                " what is in a batch. Use batch_size='per_device'; each rank then takes every"
                f" {ranks}th batch."
            )
        return divide_batch(size, ranks)

    def _compare(self, parts: LoaderParts) -> None:
        dataset = parts.loader.dataset
        seen = self.group.all_gather_object((sized(dataset), selection_hash(dataset)))
        if len(set(seen)) == 1:
            return
        name, lengths = type(dataset).__name__, [length for length, _ in seen]
        if len(set(lengths)) > 1:
            differs = f"The dataset ({name}) has another length on each rank: {lengths} by rank."
        else:
            others = [rank for rank, each in enumerate(seen) if each != seen[0]]
            differs = (
                f"The dataset ({name}) differs between ranks: its indices select other samples on rank(s)"
                f" {others} than on rank 0. Was it split at random, without a seed? Split alike on all"
                " ranks: random_split(..., generator=torch.Generator().manual_seed(0)), or"
                " seed_everything() before."
            )
        raise ConfigError(
            f"{differs} Shards are taken from one dataset that all ranks hold. Where each rank has data"
            " of its own, pass Trainer(use_distributed_sampler=False)."
        )


def divide_batch(size: int, ranks: int) -> int:
    """Return ``size / ranks``.

    Raises:
        ConfigError: ``size`` is not a multiple of ``ranks``.
    """
    if size % ranks:
        raise ConfigError(
            f"batch_size='global' means samples of all ranks together, but {size} is not a multiple of"
            f" {ranks} ranks. Nearest that are: {size - size % ranks or ranks} and"
            f" {size - size % ranks + ranks}."
        )
    return size // ranks


def as_resumable(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Tell Lightning that ``loader`` need not be warned about: its position is kept elsewhere."""
    nothing: Callable[[], dict[str, Any]] = dict
    loader.__dict__.setdefault("state_dict", nothing)
    loader.__dict__.setdefault("load_state_dict", lambda state: None)
    return loader
