"""What is asked of the engine and the trainer: what is waited for, and where a run is."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.faults.waits import OPENINGS, EngineWait
from lightning_dp.internals.lightning import pl


class Engine(Protocol):
    """The engine.

    Attributes:
        window: ``micro_batches`` is 0 between windows.
        reducer: None outside of training.
        awaited: The bucket whose updated parameters are waited for now, if any are.
    """

    window: AccumulationWindow
    reducer: Reducer | None

    @property
    def awaited(self) -> Bucket | None:
        """As above."""


class View:
    """Answers questions of threads and reports; changes nothing.

    Args:
        engine: Asked.

    Attributes:
        trainer: Whose call runs; None outside of one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trainer: pl.Trainer | None = None

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.trainer.global_step if self.trainer is not None else -1

    def window_is_closed(self) -> bool:
        """Whether no accumulation is going on."""
        return self.engine.window.micro_batches == 0

    def tail_carries_stop(self) -> bool:
        """Whether gradients carry the request to stop (automatic optimization on several ranks)."""
        reducer = self.engine.reducer
        module = self.trainer.lightning_module if self.trainer is not None else None
        carries = (
            module is not None and module.automatic_optimization and not self.engine.window.is_local
        )
        return carries and reducer is not None and reducer.group.world_size > 1

    def engine_wait(self) -> EngineWait:
        """What the engine waits for; asked by the watching thread."""
        reducer = self.engine.reducer
        if reducer is None:
            return EngineWait(0)
        begun, openings, bucket = reducer.begun, reducer.openings, reducer.waiting_for
        if reducer.is_opening:
            what = (
                f"the ranks to say what they send in step {self.step} (here requires_grad changed)"
            )
            return EngineWait(begun, what, openings=openings, kind=OPENINGS)
        awaited = self.engine.awaited
        if awaited is not None:
            what = f"the parameters of step {self.step} (bucket {awaited.index})"
            return EngineWait(begun, what, tuple(awaited.names), openings)
        if bucket is None:
            return EngineWait(begun, openings=openings)
        what = f"the gradients of step {self.step} (bucket {bucket.index})"
        return EngineWait(begun, what, tuple(bucket.names), openings)

    def groups(self) -> list[dist.ProcessGroup]:
        """The default group and the engine's own."""
        found = [dist.group.WORLD] if dist.is_initialized() else []
        if self.engine.reducer is not None:
            found.append(self.engine.reducer.group.process_group)
        return [group for group in found if group is not None]

    def where(self) -> str:
        """What this rank is doing, in words."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn is None:
            return ""
        stage = trainer.state.stage
        return f"{trainer.state.fn.value}, {stage.value if stage else 'start'}, step {self.step}"

    def __getstate__(self) -> dict[str, object]:
        """A spawned rank is given its trainer anew."""
        return {**self.__dict__, "trainer": None}
