"""What a checkpoint says about the data: plain integers and strings, the same on every rank.

The state is global: how many units all ranks together have trained. A resumed run needs nothing else,
on whatever number of ranks. Only loaders that keep a state of their own have one for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_dp.data.share import Cursor

VERSION = 1


@dataclass(frozen=True)
class LoaderState:
    """Where one loader is.

    Attributes:
        unit: ``"sample"``; ``"batch"`` where a user's batch sampler makes batches; ``"none"`` for a loader
            whose position is not ours.
        total: Units in a pass; 0 where nobody knows.
        batch_size: Units in a batch of one rank.
        pass_index: How often the loader was exhausted in this epoch.
        consumed: Units of the pass that all ranks together have trained.
        order_hash: Tells whether the pass still has the same order; 0 if it was not drawn.
    """

    unit: str = "none"
    total: int = 0
    batch_size: int = 0
    pass_index: int = 0
    consumed: int = 0
    order_hash: int = 0


@dataclass(frozen=True)
class DataState:
    """Where training is in its data.

    Attributes:
        epoch: The epoch to go on with.
        seed: Of the orders.
        world_size: Ranks that trained so far.
        accumulate: Micro-batches in an optimizer step.
        batches: Batches of a rank trained in the epoch.
        loaders: One for each training loader.
        loader_states: For each rank, the states that stateful loaders gave, by number of the loader.
        reload_epoch: When training loaders were last made anew; -1 if unknown.
    """

    epoch: int
    seed: int
    world_size: int
    accumulate: int
    batches: int
    loaders: tuple[LoaderState, ...]
    loader_states: tuple[dict[int, Any], ...] = field(default=())
    reload_epoch: int = -1

    def to_checkpoint(self) -> dict[str, Any]:
        """Return a dictionary of integers, strings and lists, loadable with ``weights_only=True``."""
        return {
            **vars(self),
            "version": VERSION,
            "loaders": [asdict(loader) for loader in self.loaders],
            "loader_states": [dict(states) for states in self.loader_states],
        }

    @classmethod
    def from_checkpoint(cls, saved: Mapping[str, Any]) -> DataState | None:
        """Read what :meth:`to_checkpoint` wrote; ``None`` for a version from the future."""
        if saved.get("version", 0) > VERSION:
            return None
        values = {each.name: saved[each.name] for each in fields(cls)}
        values["loaders"] = tuple(LoaderState(**loader) for loader in saved["loaders"])
        values["loader_states"] = tuple(dict(states) for states in saved["loader_states"])
        return cls(**values)

    @property
    def is_epoch_start(self) -> bool:
        """Whether nothing of the epoch was trained."""
        moved = any(loader.consumed or loader.pass_index for loader in self.loaders)
        return self.batches == 0 and not moved

    @property
    def effective_batch(self) -> int:
        """How many units of the first loader went into one optimizer step; 0 if that is not known."""
        return self.loader(0).batch_size * self.world_size * self.accumulate

    def loader(self, number: int) -> LoaderState:
        """Return where loader ``number`` was; one of which nothing is known if there was none."""
        return self.loaders[number] if number < len(self.loaders) else LoaderState()

    def start(self, number: int) -> Cursor:
        """Return where loader ``number`` goes on."""
        loader = self.loader(number)
        return Cursor(self.epoch, loader.pass_index, loader.consumed)

    def changed(self, number: int, seed: int, unit: str, total: int) -> str | None:
        """Say what makes it impossible to go on in the middle of the epoch, or return ``None``."""
        if self.is_epoch_start:
            return None
        if number >= len(self.loaders):
            return f"the checkpoint knows {len(self.loaders)} training loader(s)"
        saved = self.loaders[number]
        if seed != self.seed:
            return f"the seed was {self.seed} and is {seed}"
        if unit != saved.unit:
            return f"the order was of units {saved.unit!r} and is of {unit!r}"
        if saved.total and total != saved.total:
            return f"a pass had {saved.total} units ({saved.unit}) and has {total}"
        return None
