"""How long to wait, and what to do when asked to stop."""

from __future__ import annotations

import dataclasses

from lightning_dp.errors import ConfigError
from lightning_dp.faults.preemption import signal_numbers


@dataclasses.dataclass(frozen=True)
class FaultOptions:
    """Checked options; ``LeanDDPStrategy`` documents them.

    Raises:
        ConfigError: A value that is not possible.
    """

    rendezvous_timeout_s: float = 120.0
    error_grace_s: float = 3.0
    stall_report_s: float = 30.0
    preempt_signals: tuple[str, ...] = ("SIGTERM",)
    on_preempt: str = "checkpoint"

    def __post_init__(self) -> None:
        """Check."""
        for name in ("rendezvous_timeout_s", "error_grace_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}.")
        if not self.stall_report_s >= 0:
            raise ConfigError(
                f"stall_report_s must be 0 (never) or more, not {self.stall_report_s!r}."
            )
        if self.on_preempt not in ("checkpoint", "stop", "ignore"):
            raise ConfigError(
                f"on_preempt must be checkpoint, stop or ignore, not {self.on_preempt!r}."
            )
        signal_numbers(self.preempt_signals)

    @property
    def signals(self) -> tuple[int, ...]:
        """Numbers of ``preempt_signals``; none if they are ignored."""
        return signal_numbers(self.preempt_signals)
