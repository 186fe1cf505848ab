"""A Trainer inside a forked rank: quiet, on the test's ground, without files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_dp import LeanDDPStrategy
from tests.support import grounds
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.programs import free_port
from tests.support.ranks import run_ranks


def trainer(
    world_size: int,
    port: int,
    strategy: Any = None,
    root: Path | str = "/nonexistent",
    **kwargs: Any,
) -> pl.Trainer:
    """A Trainer for this rank of a group started by ``run_ranks(..., init_process_group=False)``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # The seed of orders: ddp takes 0 where nobody gives one, lean_ddp draws one.
    os.environ.setdefault("PL_GLOBAL_SEED", "0")
    defaults: dict[str, Any] = {
        **grounds.CURRENT.trainer_options(world_size),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(root),
        "max_epochs": 1,
    }
    return pl.Trainer(strategy=lean() if strategy is None else strategy, **{**defaults, **kwargs})


# Data and comparisons


class Rows(Dataset):
    """Rows of noise; ``share`` tells which of them a rank gets, in Lightning's and our order alike."""

    def __init__(self, n: int = 48, width: int = 6) -> None:
        self.rows = torch.randn(
            n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

    @staticmethod
    def share(step: int, rank: int, world_size: int, batch: int = 12) -> list[int]:
        """Rows of a rank's batch; ``batch`` is the global one. Ranks take turns."""
        return list(range(step * batch + rank, (step + 1) * batch, world_size))


def lean(**options: Any) -> LeanDDPStrategy:
    """Our strategy, for a rank that was started already."""
    options = {**grounds.CURRENT.strategy_options(), **options}
    return LeanDDPStrategy(cluster_environment=LightningEnvironment(), **options)


def ddp(**options: Any) -> DDPStrategy:
    """Lightning's, for a rank that was started already."""
    options = {**grounds.CURRENT.strategy_options(), **options}
    return DDPStrategy(cluster_environment=LightningEnvironment(), **options)


def ranks(fn: Any, world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """``fn(rank, world_size, port, *args)`` on forked ranks that leave the process group to a Trainer."""
    return run_ranks(fn, world_size, free_port(), *args, init_process_group=False, **kwargs)


def fit(
    module: pl.LightningModule,
    rank: int,
    world_size: int,
    port: int,
    strategy: Any,
    callbacks: Callable[[], list[Any]] = list,
    ckpt_path: str | None = None,
    **kwargs: Any,
) -> pl.Trainer:
    """Train on ``Rows``: 4 steps an epoch of a global batch of 12."""
    runner = trainer(world_size, port, strategy, callbacks=callbacks(), **kwargs)
    loader = DataLoader(Rows(), batch_size=12 // world_size, shuffle=False)
    runner.fit(module, loader, ckpt_path=ckpt_path)
    return runner


def same_weights(
    make: Callable[[], pl.LightningModule],
    world_size: int,
    options: dict[str, Any] | None = None,
    *,
    tolerance: float = 1e-10,
    buffers: bool = False,
    check: Callable[[pl.LightningModule, pl.Trainer], None] | None = None,
    **kwargs: Any,
) -> None:
    """Train on ``world_size`` ranks, and alone on the whole batches: the same weights on all."""

    def run(rank: int, world: int, port: int) -> dict[str, Any]:
        module = make()
        strategy: Any = (
            lean(check_replicas_every_n_steps=1, **options or {}) if world > 1 else "auto"
        )
        used = (
            dict(kwargs)
            if world > 1
            else {k: v for k, v in kwargs.items() if k != "sync_batchnorm"}
        )
        runner = fit(module, rank, world, port, strategy, **used)
        if check is not None:
            check(module, runner)
        if world > 1:
            assert_equal_on_all_ranks(module.state_dict())
        return module.state_dict() if buffers else dict(module.named_parameters())

    together = ranks(run, world_size)[0]
    alone = ranks(run, 1)[0]
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(
            together[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
