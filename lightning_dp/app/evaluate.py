"""Score a checkpoint on the test data: ``lean-ddp evaluate ckpt_path=...``.

Model and data are those of the run that wrote the checkpoint, read from the config that it left.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import hydra
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_dp.app.mistakes import explain, explained
from lightning_dp.app.report import print_table
from lightning_dp.errors import ConfigError
from lightning_dp.internals import hydra as hydra_seams

RUN_CONFIG = Path(".hydra") / "config.yaml"


@explained
def evaluate(cfg: DictConfig) -> None:
    """Restore the weights of ``cfg.ckpt_path`` and test them.

    Args:
        cfg: As composed from ``conf/eval.yaml``.

    Raises:
        ConfigError: There is no such file, or its run's config is not found and no model is given.

    Collective: every rank, from the same config. Blocks until testing has ended.
    """
    checkpoint = Path(to_absolute_path(cfg.ckpt_path))
    if not checkpoint.is_file():
        raise ConfigError(f"ckpt_path: there is no file {checkpoint}.")
    with_run_config(cfg, checkpoint)
    from lightning_dp.app.settings import build  # loads torch: not needed to see a mistake or help

    parts = build(cfg)
    results = parts.trainer.test(parts.model, parts.data, ckpt_path=str(checkpoint), verbose=False)
    if parts.trainer.is_global_zero:
        print_table(
            f"{cfg.task_name}: {type(parts.model).__name__}",
            {
                "ranks": parts.trainer.world_size,
                **{name: value for result in results for name, value in result.items()},
                "checkpoint": checkpoint,
                "folder": parts.output_dir,
            },
        )


def with_run_config(cfg: DictConfig, checkpoint: Path) -> None:
    """Lay ``cfg.model`` and ``cfg.data`` over those of the run that wrote ``checkpoint``.

    A node that names its own ``_target_`` (``model=bytes``) stands for itself.

    Raises:
        ConfigError: No config lies beside the checkpoint's folder, and ``cfg`` does not say it all.
    """
    wanted = [key for key in ("model", "data") if "_target_" not in (cfg.get(key) or {})]
    if not wanted:
        return
    file = next((d / RUN_CONFIG for d in checkpoint.parents if (d / RUN_CONFIG).is_file()), None)
    if file is None:
        raise ConfigError(
            f"No {RUN_CONFIG} was found in the folders above {checkpoint}, so its"
            f" {' and '.join(wanted)} are not known. Give them: model=... data=..., or experiment=..."
        )
    run = cast(DictConfig, OmegaConf.load(file))
    with open_dict(cfg):
        for key in wanted:
            cfg[key] = OmegaConf.merge(run[key], cfg.get(key) or {})


@hydra.main(version_base="1.3", config_path="pkg://lightning_dp.conf", config_name="eval")
def main(cfg: DictConfig) -> None:
    """Compose the config from the command line and evaluate."""
    evaluate(cfg)


if __name__ == "__main__":
    hydra_seams.explain_composition(explain)
    main()
