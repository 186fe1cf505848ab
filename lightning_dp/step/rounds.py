"""``outer`` in a Trainer's life: rounds of local steps, and what is shown and saved in mid-round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import pl
from lightning_dp.options import EngineOptions
from lightning_dp.step.fragments import Fragments
from lightning_dp.step.outer import Outer
from lightning_dp.step.outer_checks import check_outer, refuse_module
from lightning_dp.step.outer_state import steps_since, take_own

log = logging.getLogger(__name__)


def _nothing() -> None:
    """Undo nothing."""


class Rounds:
    """Nothing but attributes where the option is not given, and with one rank.

    Args:
        options: Checked options.
        hook: Whether there is a communication hook.

    Raises:
        ConfigError: Options that cannot go together.
    """

    def __init__(self, options: EngineOptions, *, hook: bool) -> None:
        check_outer(options, hook=hook)
        self._options = options
        self._outer: Outer | None = None
        self._undo: Callable[[], None] = _nothing  # by name: a spawned rank gets a pickled copy
        self._saved: Mapping[str, Any] | None = None

    def connect(
        self,
        trainer: pl.Trainer,
        reducer: Reducer,
        keeper: BufferKeeper | None,
        fragments: Fragments,
    ) -> None:
        """Begin, once there is an engine. Local.

        Raises:
            ConfigError: The module or the Trainer cannot train with few meetings.
        """
        self._undo()
        self._outer = None
        if self._options.outer is None or keeper is None:
            return
        if reducer.group.world_size == 1:
            log.warning("lean_ddp: outer has no effect with one rank: it trains as without.")
            return
        module = reducer.registry.module
        refuse_module(module, trainer)
        self._outer = Outer(self._options, module, reducer, keeper, fragments)
        self._undo = trainer_seams.around_validation(trainer, self.shown)
        if fragments.count > 1 and reducer.group.rank == 0:
            sizes = [size / 2**20 for size in fragments.nbytes]
            log.info(
                "lean_ddp: outer sends %d fragments of %.3g to %.3g MiB in turns.",
                fragments.count,
                min(sizes),
                max(sizes),
            )

    def close(self) -> None:
        """Let go of everything. Local."""
        self._undo()
        self._outer = self._saved = None

    # Steps

    @property
    def active(self) -> bool:
        """Whether ranks train alone, or will."""
        return self._outer is not None

    @property
    def mid_round(self) -> bool:
        """Whether this rank may have another model than the others now."""
        return self._outer is not None and self._outer.mid_round

    @property
    def comparable(self) -> bool:
        """Whether it is worth while to compare what is shown: it is new, or nothing is more equal later."""
        return self._outer is None or self._outer.streams or not self._outer.mid_round

    def before_step(self) -> None:
        """See :meth:`Outer.before_step`."""
        if self._outer is not None:
            self._outer.before_step()

    def end_window(self) -> None:
        """See :meth:`Outer.end_window`."""
        if self._outer is not None:
            self._outer.end_window()

    def note_step(self) -> None:
        """See :meth:`Outer.note_step`."""
        if self._outer is not None:
            self._outer.note_step()

    def end_step(self, trainer: pl.Trainer) -> None:
        """See :meth:`Outer.end_step`. Collective: every rank, at the same step."""
        if self._outer is not None:
            self._outer.end_step(is_last=trainer_seams.ends_with_step(trainer))

    def end_training(self) -> None:
        """Finish the last round. Collective: every rank."""
        if self._outer is not None:
            self._outer.finish_round()

    # What others see ([Note: two sets of weights])

    @contextmanager
    def shown(self, *, copy: bool = True) -> Generator[None]:
        """While in this context, the module holds what is equal on all ranks, or a ``copy`` of it."""
        swapped = self._outer is not None and self._outer.show_anchor(copy=copy)
        try:
            yield
        finally:
            if swapped:
                self.show_own()

    def show_equal(self) -> bool:
        """Let the module hold what is equal on all ranks; return whether it did not yet. Local."""
        return self._outer is not None and self._outer.show_anchor()

    def show_own(self) -> None:
        """Let the module hold what this rank trains. Local."""
        if self._outer is not None:
            self._outer.show_local()

    # Checkpoints

    def add_to(self, checkpoint: dict[str, Any], trainer: pl.Trainer | None) -> None:
        """Add what resumes a round. Collective: every rank, unless one is failing."""
        if self._outer is not None and trainer is not None and "optimizer_states" in checkpoint:
            by_rank = "optimizer_states", type(trainer.precision_plugin).__qualname__
            self._outer.add_to(checkpoint, by_rank, alone=trainer_seams.is_unwinding(trainer))

    def remember(self, checkpoint: dict[str, Any], rank: int, world_size: int) -> None:
        """Keep what a loaded checkpoint says; give the rank its own optimizer state. Local."""
        self._saved = checkpoint.get("lean_ddp", {}).get("outer")
        if self._options.outer is not None:
            take_own(checkpoint, rank, world_size)

    def begin_training(self, trainer: pl.Trainer | None) -> None:
        """Go on in the round that was saved. Local; every rank calls it."""
        if self._outer is not None and trainer is not None:
            self._outer.restore(self._saved, trainer.global_step)
        elif self._saved is not None and steps_since(self._saved):
            log.warning(
                "lean_ddp: the checkpoint was saved in a round of outer, which this run does not have: it"
                " goes on from the last meeting; %d step(s) are lost.",
                steps_since(self._saved),
            )
