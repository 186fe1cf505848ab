"""``NoiseScale``: logs the gradient noise scale of ``lean_ddp``, which says how large a batch is useful."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lightning_dp.engine.control import WindowTotals
from lightning_dp.internals.lightning import Callback
from lightning_dp.internals.trainer import rank_batch_size
from lightning_dp.measure.noise import NoiseAverage, NoiseEstimate

if TYPE_CHECKING:
    from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)


class NoiseScale(Callback):
    """Estimates ``B_simple``, the batch at which noise and gradient weigh the same, with an interval.

    Logs ``lean/noise_scale`` with its 95 % interval (``_low``, ``_high``), ``lean/batch_fraction`` (``B /
    B_simple``), ``lean/extra_steps`` and ``lean/extra_samples`` (what this batch needs, as a multiple of
    the least possible), and ``lean/adascale_gain``. All in samples; in the unit of ``loss_weight`` where
    the module returns one; in micro-batches where the loader does not say how large they are. What is not
    finite yet is not logged.

    Two small batches a window are needed: two ranks, or two micro-batches of one rank. Samples must be
    independent: layers and losses that look at a whole batch (BatchNorm, contrastive losses) shift it. A
    compressed wire's rounding counts as noise. With other strategies it does nothing.

    Args:
        decay: Of the averages, which cover about ``1 / (1 - decay)`` measured steps.
        every_n_steps: One step in so many is measured: a pass over the gradients each.
    """

    def __init__(self, decay: float = 0.99, every_n_steps: int = 1) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} is not possible; it must be above 0 and below 1.")
        if every_n_steps < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps} is not possible; it must be 1 or more."
            )
        self.every_n_steps = every_n_steps
        self.average = NoiseAverage(decay)
        self._window: WindowTotals | None = None  # the last one, whose average's norm is under way
        self._unit = 1.0
        self._logged = -1

    @property
    def estimate(self) -> NoiseEstimate | None:
        """The noise scale so far; ``None`` before the third step."""
        return self.average.estimate(self._unit)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the norms taken.

        Raises:
            ConfigError: The run has no two small batches, or no averaged gradient.
        """
        measure = getattr(trainer.strategy, "measure_noise", None)
        self.average = NoiseAverage(self.average.decay)
        self._window = None
        if measure is not None:
            measure(self.every_n_steps)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Take in a window when its norms are there, and log now and then."""
        window: WindowTotals | None = getattr(trainer.strategy, "settled_totals", None)
        if window is None or window is self._window:
            return
        last, self._window = self._window, window
        if last is None:
            return
        if self.average.add(last.part_norm, window.mean_norm_before, last.weight, last.parts):
            self._unit = _unit(trainer, last)
        step, every = trainer.global_step, max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if step != self._logged and step % every == 0:
            self._logged = step
            metrics = {f"lean/{name}": value for name, value in self._metrics().items()}
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=step)

    def _metrics(self) -> dict[str, float]:
        found = self.estimate
        if found is None:
            return {}
        metrics = {
            "noise_scale": found.value,
            "noise_scale_low": found.low,
            "noise_scale_high": found.high,
            "batch_fraction": found.batch_fraction,
            "extra_steps": found.extra_steps,
            "extra_samples": found.extra_samples,
            "adascale_gain": found.adascale_gain,
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say in one sentence what was found."""
        measure = getattr(trainer.strategy, "measure_noise", None)
        if measure is not None:
            measure(None)
        found = self.estimate
        if found is None or not trainer.is_global_zero:
            return
        if math.isinf(found.high):
            log.info(
                "lean_ddp: the noise scale is above %.3g, and batches of %.3g over so few steps do not tell"
                " more: train longer, or with larger batches.",
                found.low,
                found.batch,
            )
            return
        log.info(
            "lean_ddp: the noise scale is %.3g (95 %%: %.3g to %.3g). A batch of %.3g needs %.2g times the"
            " samples of a small one and %.2g times the steps of a huge one.",
            found.value,
            found.low,
            found.high,
            found.batch,
            found.extra_samples,
            found.extra_steps,
        )


def _unit(trainer: pl.Trainer, window: WindowTotals) -> float:
    """Samples for each unit of weight: where the module gives no weights, a micro-batch weighs 1."""
    if math.isclose(window.weight, window.micro_batches, rel_tol=1e-6):
        return float(rank_batch_size(trainer) or 1)
    return 1.0
