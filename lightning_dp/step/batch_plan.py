"""Batch arithmetic: how many micro-batches make one global batch on so many ranks."""

from __future__ import annotations

from typing import Any

from lightning_dp.errors import ConfigError
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.options import Batch


def batch_plan(batch: Batch, world_size: int, accumulate: int) -> tuple[int, int]:
    """Work out the accumulation from a global batch: ``global = micro * ranks * accumulate``.

    Args:
        batch: ``{"global": 512, "micro": 16, "accumulate": "auto"}``, checked.
        world_size: Ranks over all nodes.
        accumulate: The Trainer's ``accumulate_grad_batches``.

    Returns:
        Micro-batches a window, and the micro-batch that loaders must have.

    Raises:
        ConfigError: The numbers contradict each other; names all three and the nearest that would do.
    """
    total, micro, steps = batch["global"], batch["micro"], batch.get("accumulate", "auto")
    per_step = micro * world_size
    if steps == "auto" and total % per_step == 0:
        steps = total // per_step
    if not isinstance(steps, int) or steps * per_step != total:
        near = max(1, round(total / per_step))
        raise ConfigError(
            f"batch.global={total} is not batch.micro={micro} x {world_size} rank(s) x"
            f" accumulate={batch.get('accumulate', 'auto')}. Nearest that fit: global={near * per_step}"
            f" with accumulate={near}."
        )
    if accumulate not in (1, steps):
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulate} contradicts batch: global={total}, micro="
            f"{micro} on {world_size} rank(s) needs {steps}. Leave it out, or set it to {steps}."
        )
    return steps, micro


def check_micro(
    loader: object, micro: int | None, module: Any, world_size: int, *, is_global: bool
) -> None:
    """Check that a training loader's batches are the micro-batches of the plan.

    Args:
        loader: A loader that is about to be sharded.
        micro: Samples per rank and micro-batch; ``None`` checks nothing.
        module: The LightningModule, to know whether this is training.
        world_size: Ranks.
        is_global: Whether the loader holds the whole world's batch (``batch_size="global"``).

    Raises:
        ConfigError: Names both numbers.
    """
    size = getattr(loader, "batch_size", None)
    trainer = trainer_seams.attached_trainer(module)
    if micro is None or size is None or trainer is None or not trainer.training:
        return
    allowed = micro * world_size if is_global else micro
    if size != allowed:
        raise ConfigError(
            f"the training loader's batch_size is {size}, but batch.micro={micro} needs {allowed}. Make"
            " them one number in the config (data.batch_size: ${...batch.micro})."
        )
