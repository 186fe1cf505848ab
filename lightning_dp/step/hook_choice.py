"""The user's communication hook: made into a wire, saved with checkpoints, restored from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.wires.comm_hook import CommHookWire
from lightning_dp.engine.wires.comm_hook_state import forget, hook_state, load_hook_state
from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)


@dataclass
class HookChoice:
    """``ddp_comm_hook``, ``ddp_comm_state`` and ``ddp_comm_wrapper`` as given, or nothing.

    Attributes:
        hook: A communication hook, or ``None``.
        state: Its state.
        wrapper: Wraps the hook.
    """

    hook: Callable[..., Any] | None
    state: object
    wrapper: Callable[..., Any] | None
    _saved: Mapping[str, Any] | None = None
    _lent: list[Any] = field(default_factory=list)

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.hook is not None

    def wire(self, group: ReplicaGroup, trainer: pl.Trainer) -> CommHookWire | None:
        """Return a wire that sends buckets through the hook; ``None`` without a hook."""
        if self.hook is None:
            return None
        # gloo's threads may drop a hook's callbacks, which name the group, after the group was closed. If
        # theirs were the last reference, the group would be destroyed on its own thread, which aborts
        # the process. So it lives as long as this object.
        self._lent.append(group.process_group)
        heal = getattr(trainer.precision_plugin, "scaler", None) is not None
        return CommHookWire(group, self.hook, self.state, self.wrapper, heal=heal)

    def add_to(self, checkpoint: dict[str, Any], reducer: Reducer) -> None:
        """Add the hook's state. Collective: every rank."""
        if self.hook is None:
            return
        kept = hook_state(self.state, reducer.layout, reducer.group)
        if kept is not None:
            checkpoint.setdefault("lean_ddp", {})["engine"] = {"hook": kept}

    def remember(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep what a loaded checkpoint says of the hook."""
        self._saved = checkpoint.get("lean_ddp", {}).get("engine", {}).get("hook")

    def forget(self) -> None:
        """Drop what was loaded."""
        self._saved = None

    def restore(self, reducer: Reducer) -> None:
        """Put the loaded state back, once there is an engine. Every rank calls it."""
        saved, self._saved = self._saved, None
        if self.hook is None:
            return
        if saved is None:
            forget(self.state)  # an earlier fit's buckets were others
            return
        message = load_hook_state(self.state, saved, reducer.group)
        reducer.layout.remembered = list(saved["layout"])
        if message and reducer.group.rank == 0:
            log.warning("lean_ddp: communication hook: %s.", message)
