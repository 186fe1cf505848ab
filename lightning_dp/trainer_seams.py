"""Every private name of Lightning that we touch, one small function each, with what it falls back to.

A Lightning upgrade is a read of this file. Each function has a test, also for the name being gone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl

# -- Engine


def is_unwinding(trainer: pl.Trainer | None) -> bool:
    """Whether the trainer is on its way out with an exception, perhaps on this rank only.

    Anything collective would then wait for ranks that may never come. ``TrainerStatus.INTERRUPTED`` is
    set first; where it is missing, an exception being handled says the same.
    """
    status = getattr(getattr(trainer, "state", None), "status", None)
    if status is not None and str(getattr(status, "value", status)) == "interrupted":
        return True
    error = sys.exc_info()[1]
    return error is not None and not isinstance(error, (StopIteration, KeyError, AttributeError))


def averages_weights(trainer: pl.Trainer) -> bool:
    """Whether a callback averages the module's weights and buffers while it trains (EMA, SWA)."""
    from lightning.pytorch import callbacks

    kinds = tuple(
        kind
        for kind in (
            getattr(callbacks, "WeightAveraging", None),
            getattr(callbacks, "StochasticWeightAveraging", None),
        )
        if kind is not None
    )
    return any(isinstance(callback, kinds) for callback in getattr(trainer, "callbacks", ()))


def attached_trainer(module: Any) -> pl.Trainer | None:
    """The module's trainer, or ``None`` where it has none (the public property raises)."""
    return getattr(module, "_trainer", None)
