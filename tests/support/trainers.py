"""A Trainer inside a forked rank: quiet, on CPU, without files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_dp import LeanDDPStrategy


def free_port() -> int:
    """A port for one run; all ranks must be given the same one."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def trainer(
    world_size: int, port: int, strategy: Any = None, root: Path | str = "/nonexistent", **kwargs: Any
) -> pl.Trainer:
    """A Trainer for this rank of a group started by ``run_ranks(..., init_process_group=False)``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # The seed of orders: ddp takes 0 where nobody gives one, lean_ddp draws one.
    os.environ.setdefault("PL_GLOBAL_SEED", "0")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(root),
        "max_epochs": 1,
    }
    if strategy is None:
        strategy = LeanDDPStrategy(cluster_environment=LightningEnvironment())
    return pl.Trainer(strategy=strategy, **{**defaults, **kwargs})
