"""``LeanDDPMonitor``: logs what each step cost, and the window's true mean loss, to any logger."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_dp.internals.lightning import Callback, pl


class LeanDDPMonitor(Callback):
    """Logs ``StepStats`` of ``lean_ddp`` to the Trainer's loggers.

    ``lean/loss`` is the weighted mean over every micro-batch and rank of the window, where a loss logged
    in ``training_step`` is the last micro-batch's of one rank. With other strategies it does nothing.

    Args:
        every_n_steps: Optimizer steps between two records.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps} is not possible; it must be 1 or more."
            )
        self.every_n_steps = every_n_steps
        self._logged = -1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Record the step that ended with this batch, if one did."""
        read = getattr(trainer.strategy, "step_stats", None)
        step = trainer.global_step
        if read is None or step == self._logged or step % self.every_n_steps:
            return
        self._logged = step
        stats = read()
        if stats is None:
            return
        metrics = {f"lean/{name}": value for name, value in asdict(stats).items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
