"""The data plane's options: checked once, in the strategy's constructor."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.errors import ConfigError
from lightning_dp.options import one_of


@dataclass(frozen=True)
class DataOptions:
    """How data is shared; arguments of the same names as the strategy's."""

    iterable: str = "warn"
    uneven_train: str = "error"
    eval_tail: str = "exact"
    batch_size: str = "per_device"
    resume: str = "auto"
    rank_rng: str = "workers"
    gather_predictions: bool = False
    strict_data: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        one_of("iterable", self.iterable, ("warn", "shard", "off", "error"))
        one_of("uneven_train", self.uneven_train, ("error", "min"))
        one_of("eval_tail", self.eval_tail, ("exact", "pad"))
        one_of("batch_size", self.batch_size, ("per_device", "global"))
        one_of("resume", self.resume, ("auto", "strict"))
        one_of("rank_rng", self.rank_rng, ("workers", "all"))
        for name in ("gather_predictions", "strict_data"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not possible; it must be true or false."
                )
