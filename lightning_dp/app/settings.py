"""From a composed config to objects."""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_dp.app.arguments import check_arguments

# True of every small run, and no reason to act.
_NOISE = (
    ".*does not have many workers.*",
    ".*isinstance.treespec, LeafSpec.*",
    ".*exists and is not empty.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
)


@dataclass(frozen=True)
class Parts:
    """What a run is made of, built from a config by :func:`build`."""

    model: L.LightningModule
    data: L.LightningDataModule
    trainer: L.Trainer
    output_dir: Path


def build(cfg: DictConfig) -> Parts:
    """Check ``cfg``, seed, and instantiate model, data, callbacks, loggers and trainer.

    Every rank does this from the same config and the same seed, so that all hold the same weights
    before they first communicate.

    Raises:
        ConfigError: See :func:`lightning_dp.app.arguments.check_arguments`.
    """
    check_arguments(cfg)
    _calm_output()
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    make = functools.partial(instantiate, _convert_="all")
    trainer = make(
        cfg.trainer,
        callbacks=[make(node) for node in cfg.callbacks.values()],
        logger=[make(node) for node in cfg.logger.values()],
    )
    return Parts(
        model=make(cfg.model),
        data=make(cfg.data),
        trainer=trainer,
        output_dir=Path(cfg.paths.output_dir),
    )


def _calm_output() -> None:
    """Print each line of Lightning once (under Hydra the root logger prints it too), and no adverts."""
    root = logging.getLogger()
    if root.handlers:
        for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
            logger = logging.getLogger(name)
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
            logger.propagate = True
    for handler in root.handlers:
        handler.addFilter(_not_an_advert)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message)


def _not_an_advert(record: logging.LogRecord) -> bool:
    return "Tip: For seamless" not in record.getMessage()
