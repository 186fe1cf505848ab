"""Norms for the gradient noise scale: in which runs, and without a loss scaler's factor."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.errors import ConfigError
from lightning_dp.options import EngineOptions


def begin_norms(reducer: Reducer, scaler: Any) -> None:
    """A micro-batch is about to be back-propagated, its loss times the factor of ``scaler``. Local."""
    if reducer.norms is not None:
        one = torch.ones((), device=reducer.group.device)
        reducer.norms.loss_scale = scaler.scale(one) if scaler is not None else 1.0
        reducer.norms.begin_backward(reducer.window)


def check_noise(options: EngineOptions, *, automatic: bool, parts: int) -> None:
    """Refuse what would give another number than the noise scale.

    Args:
        options: The strategy's.
        automatic: Whether the module uses automatic optimization.
        parts: Small batches of a window, at most.

    Raises:
        ConfigError: In one sentence, with what to change.
    """
    if not automatic:
        raise ConfigError(
            "NoiseScale measures automatic optimization: in manual optimization it cannot know which"
            " backwards make one step. Take the callback away."
        )
    if options.outer is not None:
        raise ConfigError(
            "NoiseScale needs the averaged gradient, and with outer ranks average weights instead. Take the"
            " callback away, or outer."
        )
    if options.accum_sync == "every":
        raise ConfigError(
            "NoiseScale needs each rank's own gradient of a window, and accum_sync='every' averages after"
            " each micro-batch. Set accum_sync='window'."
        )
    if parts < 2:
        raise ConfigError(
            "NoiseScale compares small batches with their mean, and one rank with one micro-batch a window"
            " has only one. Use two ranks, or accumulate_grad_batches=2 with half the batch."
        )
