"""How buckets are cut: of what type, and how large where the user leaves it open."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_dp.engine.bucket import UNCUT, Slicing
from lightning_dp.engine.plan.layout import MIB, LayoutOptions
from lightning_dp.options import EngineOptions


def layout_options(
    options: EngineOptions,
    device: torch.device,
    *,
    shared: bool = False,
    slicing: Slicing = UNCUT,
) -> LayoutOptions:
    """How to cut buckets on ``device``; ``shared``: they travel through shared memory."""
    # Measured on gloo over 1 Gbit/s: smaller buckets leave less to wait for after the backward
    # until per-message latency takes over at about 1 MiB. NCCL's messages are worth less each, and
    # in shared memory there is next to nothing to wait for.
    auto = options.bucket_cap_mb == "auto"
    default = 25.0 if device.type == "cuda" or shared else 4.0
    cap = int((default if auto else float(options.bucket_cap_mb)) * MIB)
    # On an accelerator gradients arrive when the host does not look; there the default holds. What
    # is chosen by the clock differs between runs, and on three ranks or more another layout adds
    # in another order: ``Trainer(deterministic=True)`` keeps the default too.
    # With ``zero`` the optimizer's state is cut as the buckets are, and must not be cut again.
    measurable = auto and device.type == "cpu" and not shared and slicing == UNCUT
    wire = options.wire["dtype"] if isinstance(options.wire, Mapping) else options.wire
    return LayoutOptions(
        cap_bytes=cap,
        first_bytes=min(cap, MIB),
        last_bytes=min(cap, MIB),
        reduce_dtype=torch.float32 if wire == "fp32" else None,
        advise=wire == "auto",
        tune=measurable and not torch.are_deterministic_algorithms_enabled(),
        slicing=slicing,
    )
