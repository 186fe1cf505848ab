"""What a loaded checkpoint says about the data: our own state, or the counters of Lightning's ``ddp``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dp.data.loader import LoaderParts, Shard
from lightning_dp.data.shard import TrainPlan
from lightning_dp.data.share import Cursor
from lightning_dp.data.state import DataState, LoaderState
from lightning_dp.internals import loaders as loader_seams


def unit_of(parts: LoaderParts) -> str:
    """What a loader's order is made of."""
    return "batch" if parts.source.batches else "sample"


@dataclass(frozen=True)
class Resume:
    """Where training goes on.

    Attributes:
        epoch: The epoch to train.
        batches: Batches of it that each rank has trained.
        state: Our own state; ``None`` for a checkpoint that another strategy wrote.
        foreign_states: Then: what rank 0's stateful loaders said, in order.
    """

    epoch: int
    batches: int
    state: DataState | None = None
    foreign_states: tuple[Any, ...] = ()

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> Resume | None:
        """Read a checkpoint and take loader states out of it: the Trainer would give all ranks the same.

        Returns:
            ``None`` if the checkpoint does not say where training is.
        """
        foreign = loader_seams.take_loader_states(checkpoint)
        saved = checkpoint.get("lean_ddp", {}).get("data")
        state = DataState.from_checkpoint(saved) if saved is not None else None
        if state is not None:
            return cls(state.epoch, state.batches, state)
        at = loader_seams.saved_progress(checkpoint)
        if at is None:
            return None
        if at.is_over():
            # In its last hooks an epoch counts as processed already; before, it does not.
            processed = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
            over = at.epoch if processed["ready"] == at.epoch else at.epoch + 1
            return cls(over, 0)
        return cls(at.epoch, at.done, None, tuple(foreign) if at.done else ())

    @property
    def is_epoch_start(self) -> bool:
        """Whether nothing of the epoch was trained."""
        return self.state.is_epoch_start if self.state is not None else self.batches == 0

    def start(self, number: int, parts: LoaderParts, shard: Shard) -> tuple[Cursor, str | None]:
        """Return where loader ``number`` goes on, and what makes that impossible if something does."""
        total = parts.source.length or 0
        if self.state is not None:
            changed = self.state.changed(number, shard.seed, unit_of(parts), total)
            return (self.state.start(number) if changed is None else Cursor(self.epoch)), changed
        # Another strategy's counters, taken for those of this run's ranks and batch size.
        plan = TrainPlan(total, shard.world_size, parts.batch_size, parts.drop_last)
        passes, rest = divmod(self.batches, max(1, plan.whole_batches))
        return Cursor(self.epoch, passes, plan.consumed_after(rest)), None

    def loader(self, number: int) -> LoaderState:
        """Where loader ``number`` was, as far as is known."""
        return self.state.loader(number) if self.state is not None else LoaderState()

    # States of loaders that keep their own

    def states(self, number: int) -> list[Any]:
        """The states of loader ``number`` by rank of the checkpoint; none at an epoch's head."""
        ranks = (
            self.state.loader_states if self.state is not None and not self.is_epoch_start else ()
        )
        return [states[number] for states in ranks if number in states]

    def own_state(self, number: int, nth_stateful: int, shard: Shard) -> Any:
        """This rank's state for a stateful loader; ``None`` if there is none, or the ranks are others.

        Args:
            number: The loader, among all.
            nth_stateful: Among the stateful ones.
            shard: This rank.
        """
        if self.is_epoch_start:
            return None
        if self.state is None:
            several = self.foreign_states[nth_stateful : nth_stateful + 1]
            return several[0] if several else None
        if len(self.state.loader_states) != shard.world_size:
            return None
        return self.state.loader_states[shard.rank].get(number)
