"""What is asked of the engine and the trainer: what is waited for, and where a run is."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.faults.waits import GRADIENTS, OPENINGS, EngineWait
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

    def gradients_carry_stop(self) -> bool:
        """Whether gradients carry the request to stop (automatic optimization on several ranks)."""
        reducer, trainer = self.engine.reducer, self.trainer
        if reducer is None or trainer is None or self.engine.window.is_local:
            return False
        return reducer.group.world_size > 1 and trainer.lightning_module.automatic_optimization

    def engine_wait(self) -> EngineWait:
        """What the engine waits for; asked by the watching thread."""
        reducer = self.engine.reducer
        if reducer is None:
            return EngineWait(0)
        begun, openings = reducer.begun, reducer.openings
        of_gradients, of_parameters = reducer.waiting_for, self.engine.awaited
        what, kind, bucket = "", GRADIENTS, None
        if reducer.is_opening:
            kind = OPENINGS
            what = (
                f"the ranks to say what they send in step {self.step} (here requires_grad changed)"
            )
        elif (bucket := of_parameters) is not None:
            what = f"the parameters of step {self.step} (bucket {bucket.index})"
        elif (bucket := of_gradients) is not None:
            what = f"the gradients of step {self.step} (bucket {bucket.index})"
        names = tuple(bucket.names) if bucket is not None else ()
        return EngineWait(begun, what, names, openings, kind)

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
