"""From a composed config to objects, and from a mistake to one paragraph."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lightning as L
from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_dp.app.arguments import check_arguments
from lightning_dp.errors import ConfigError, LaunchError

T = TypeVar("T")
# Mistakes that need no traceback: the message says what to change.
_EXPLAINED = (ConfigError, LaunchError, MisconfigurationException, OmegaConfBaseException)
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


def explained(task: Callable[[DictConfig], T]) -> Callable[[DictConfig], T]:
    """Let Hydra print the mistakes that explain themselves without a traceback; exit code 1."""

    @functools.wraps(task)
    def wrapper(cfg: DictConfig) -> T:
        try:
            return task(cfg)
        except _EXPLAINED as error:
            raise CompactHydraException(f"{type(error).__name__}: {error}") from error

    return wrapper


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
