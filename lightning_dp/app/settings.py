"""From a composed config to objects."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_dp.app.arguments import check_arguments, targets
from lightning_dp.internals import binding

if TYPE_CHECKING:
    from lightning_dp.internals.lightning import pl

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

    model: pl.LightningModule
    data: pl.LightningDataModule
    trainer: pl.Trainer
    output_dir: Path


def build(cfg: DictConfig) -> Parts:
    """Check ``cfg``, seed, and instantiate model, data, callbacks, loggers and trainer.

    Every rank does this from the same config and the same seed, so that all hold the same weights
    before they first communicate.

    Raises:
        ConfigError: See :func:`lightning_dp.app.arguments.check_arguments`.
    """
    _follow_binding(cfg)
    from lightning_dp.internals.lightning import pl

    check_arguments(cfg)
    _calm_output()
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
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


def _follow_binding(cfg: DictConfig) -> None:
    """Take Lightning's classes from the package that the model's class derives from."""
    package, name = None, str(OmegaConf.select(cfg, "model._target_"))
    with contextlib.suppress(Exception):  # a wrong target is told by check_arguments
        package = binding.package_of(get_class(name))
    if package is not None:
        binding.bind(package, f"model._target_={name}")
    with read_write(cfg):
        for _, node in targets(cfg):
            node["_target_"] = binding.translated(str(node["_target_"]))


def _calm_output() -> None:
    """Print each line of Lightning once (under Hydra the root logger prints it too), and no adverts."""
    root = logging.getLogger()
    if root.handlers:
        for name in ("lightning", *binding.TRAINERS.values(), *binding.FABRICS.values()):
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
