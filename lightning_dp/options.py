"""The strategy's options: checked once, in the constructor, with messages that name the argument."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lightning_dp.engine.plan.layout import MIB, LayoutOptions
from lightning_dp.errors import ConfigError, some_names

# What torch's DDP needs and this engine does not. Accepted so that configs port; they do nothing.
DDP_ONLY = {
    "find_unused_parameters": "unused parameters are always handled, without a graph traversal",
    "static_graph": "nothing is assumed about the graph",
    "gradient_as_bucket_view": "gradients are always views of buckets",
    "broadcast_buffers": "buffers are made equal when they are used (see `buffers`)",
    "check_reduction": "every backward is checked",
}

REDUCE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def refuse_unknown(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Raise for keyword arguments that ``function`` does not have.

    Raises:
        TypeError: Names the argument and the nearest one that exists; where none is near, a few of them.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name != "self"]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"Did you mean {near[0]!r}?"
                if near
                else f"It takes {some_names(known)}: see help(lightning_dp.LeanDDPStrategy)."
            )
            raise TypeError(f"LeanDDPStrategy has no argument {name!r}. {hint}")


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that ``value`` is one of ``choices``.

    Raises:
        ConfigError: Names the argument, the value and the choices.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{name}={value!r} is not possible; choose one of {listed}.")


def positive(name: str, value: Any, *, zero: bool = False) -> None:
    """Check that ``value`` is a number above zero (or zero, where allowed).

    Raises:
        ConfigError: Names the argument and the value.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or value < 0 or (value == 0 and not zero):
        least = "0 or more" if zero else "above 0"
        raise ConfigError(f"{name}={value!r} is not possible; it must be a number {least}.")


@dataclass(frozen=True)
class EngineOptions:
    """What the engine is built with; arguments of the same names as the strategy's."""

    bucket_cap_mb: float | str = "auto"
    reduce_dtype: str | None = None
    deferred: tuple[str, ...] = ()
    buffers: str = "lazy"
    buffer_reduce: str = "broadcast"
    check_replicas_every_n_steps: int = 1000
    on_mismatch: str = "raise"
    check_gradients: str = "off"
    accum_sync: str = "window"
    manual_sync: str = "each_backward"
    tail: str = "step"
    mid_window: str = "save"
    shared_memory: bool = True

    def __post_init__(self) -> None:
        """Check every value."""
        if self.bucket_cap_mb != "auto":
            positive("bucket_cap_mb", self.bucket_cap_mb)
        one_of("reduce_dtype", self.reduce_dtype, (None, *REDUCE_DTYPES))
        one_of("buffers", self.buffers, ("lazy", "step", "none"))
        one_of("buffer_reduce", self.buffer_reduce, ("broadcast", "mean"))
        positive("check_replicas_every_n_steps", self.check_replicas_every_n_steps, zero=True)
        one_of("on_mismatch", self.on_mismatch, ("raise", "rebroadcast"))
        one_of("check_gradients", self.check_gradients, ("off", "warn", "raise"))
        one_of("accum_sync", self.accum_sync, ("window", "every"))
        one_of("tail", self.tail, ("step", "carry", "drop"))
        one_of("mid_window", self.mid_window, ("save", "boundary"))
        one_of("shared_memory", self.shared_memory, (True, False))
        one_of("manual_sync", self.manual_sync, ("each_backward", "on_step"))

    def layout(self, device: torch.device, *, shared: bool = False) -> LayoutOptions:
        """How to cut buckets on ``device``; ``shared``: they travel through shared memory."""
        # Measured on gloo over 1 Gbit/s: smaller buckets leave less to wait for after the backward
        # until per-message latency takes over at about 1 MiB. NCCL's messages are worth less each, and
        # in shared memory there is next to nothing to wait for.
        auto = 25.0 if device.type == "cuda" or shared else 4.0
        cap = int((auto if self.bucket_cap_mb == "auto" else float(self.bucket_cap_mb)) * MIB)
        dtype = REDUCE_DTYPES[self.reduce_dtype] if self.reduce_dtype is not None else None
        return LayoutOptions(
            cap_bytes=cap,
            first_bytes=min(cap, MIB),
            last_bytes=min(cap, MIB),
            reduce_dtype=dtype,
            tune=not shared and self._may_tune(device),
        )

    def _may_tune(self, device: torch.device) -> bool:
        # On an accelerator gradients arrive when the host does not look; there the default holds. What
        # is chosen by the clock differs between runs, and on three ranks or more another layout adds
        # in another order: ``Trainer(deterministic=True)`` keeps the default too.
        measurable = self.bucket_cap_mb == "auto" and device.type == "cpu"
        return measurable and not torch.are_deterministic_algorithms_enabled()


def as_timedelta(name: str, value: timedelta | float | None) -> timedelta | None:
    """Take seconds (as in YAML) or a timedelta.

    Raises:
        ConfigError: Neither, or not above zero.
    """
    if value is None or isinstance(value, timedelta):
        return value
    positive(name, value)
    return timedelta(seconds=float(value))
