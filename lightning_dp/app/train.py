"""Train a LightningModule from a composed config: ``lean-ddp train``.

The same as ``python -m lightning_dp.app.train``, under torchrun and SLURM too. Every rank runs this
file; Hydra gives each the same config and :mod:`lightning_dp.app.run_dir` the same folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_dp.app.mistakes import explain, explained
from lightning_dp.app.report import draw_curves, keep_earlier_metrics, print_table
from lightning_dp.internals import hydra as hydra_seams

if TYPE_CHECKING:
    from lightning_dp.app.settings import Parts
    from lightning_dp.internals.lightning import pl


@explained
def train(cfg: DictConfig) -> float | None:
    """Fit, then test the best checkpoint, and leave metrics, curves and checkpoints behind.

    Args:
        cfg: As composed from ``conf/train.yaml``.

    Returns:
        The value of ``monitor.metric`` at the end of training, for sweepers; None where there is none.

    Collective: every rank, from the same config. Blocks until training and testing have ended.
    """
    from lightning_dp.app.settings import build  # loads torch: not needed to see a mistake or help

    parts = build(cfg)
    trainer = parts.trainer
    if trainer.is_global_zero:
        keep_earlier_metrics(parts.output_dir, resumes=cfg.ckpt_path is not None)
    begin = time.monotonic()
    if cfg.train:
        trainer.fit(parts.model, parts.data, ckpt_path=cfg.ckpt_path)
    seconds = time.monotonic() - begin
    monitored = trainer.callback_metrics.get(cfg.monitor.metric)
    steps = trainer.global_step
    tested = _test(cfg, parts) if cfg.test else {}
    if trainer.is_global_zero:
        draw_curves(parts.output_dir)
        print_table(
            f"{cfg.task_name}: {type(parts.model).__name__}",
            {
                "ranks": trainer.world_size,
                "steps": steps,
                "effective batch": _effective_batch(cfg, trainer),
                **tested,
                "training time": f"{seconds:.1f} s",
                **_state(trainer),
                **_timeline(trainer),
                "folder": parts.output_dir,
            },
        )
    return None if monitored is None else float(monitored)


def _test(cfg: DictConfig, parts: Parts) -> Mapping[str, Any]:
    """Score the best checkpoint, or the weights as they are where nothing was saved."""
    best = getattr(parts.trainer.checkpoint_callback, "best_model_path", "")
    saved = bool(cfg.train and best)
    ckpt_path = "best" if saved else None if cfg.train else cfg.ckpt_path
    results = parts.trainer.test(parts.model, parts.data, ckpt_path=ckpt_path, verbose=False)
    return {name: value for result in results for name, value in result.items()}


def _state(trainer: pl.Trainer) -> Mapping[str, str]:
    """What a rank holds of the optimizer's state, where ranks hold shares of it."""
    held = getattr(trainer.strategy, "optimizer_state_bytes", 0)
    options = getattr(trainer.strategy, "options", None)
    if not held or not getattr(options, "zero", 0):
        return {}
    return {"optimizer state a rank": f"{held / 2**20:.2f} MiB"}


def _timeline(trainer: pl.Trainer) -> Mapping[str, Path]:
    """What ``debug=timeline`` has drawn."""
    from lightning_dp import StepTimeline

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StepTimeline) and callback.picture is not None:
            return {"timeline": callback.picture}
    return {}


def _effective_batch(cfg: DictConfig, trainer: pl.Trainer) -> int | str:
    """Samples behind one optimizer step, over all ranks."""
    batch_size = cfg.data.get("batch_size")
    if not isinstance(batch_size, int):
        return "not known (data.batch_size is not set)"
    if OmegaConf.select(cfg, "strategy.batch_size") != "global":
        batch_size *= trainer.world_size
    return batch_size * trainer.accumulate_grad_batches


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Compose the config from the command line and train."""
    return train(cfg)


if __name__ == "__main__":
    hydra_seams.explain_composition(explain)
    main()
