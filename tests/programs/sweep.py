"""A Hydra application as a user would write it. Run by the launch tests."""

import json
import os
import random
import sys
from pathlib import Path

import hydra
import lightning as L
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

import lightning_dp

OmegaConf.register_new_resolver("draw", lambda: random.SystemRandom().randrange(10**9))

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="drawn",
    node={
        "_target_": "hydra_plugins.drawn.DrawnSweeper",
        "jobs": [["devices=2"], ["devices=3"], ["devices=1"]],
    },
)
ConfigStore.instance().store(
    name="config",
    node={
        "devices": 2,
        "foo": 0,
        "job": 0,
        "fail_on": -1,
        "how": "raise",
        "strategy": "lean_ddp",
        "note": "it's ${foo}",
        "started": "${now:%H-%M-%S-%f}",
        "drawn": "run ${draw:}",
        "inside": {"seeds": [1, "${draw:}"], "again": "${drawn}"},
    },
)


class Model(BoringModel):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg

    def training_step(self, batch, batch_idx):
        if self.cfg.job == self.cfg.fail_on and self.trainer.global_rank == 1:
            if self.cfg.how == "exit":
                os._exit(5)
            raise ValueError(f"job {self.cfg.job} cannot work")
        return super().training_step(batch, batch_idx)


@hydra.main(version_base="1.3", config_name="config", config_path=None)
def main(cfg):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=cfg.devices,
        strategy=cfg.strategy,
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(cfg))
    job = HydraConfig.get()
    told = {
        "config": OmegaConf.to_container(cfg, resolve=True),
        "mode": str(job.mode),
        "output_dir": job.runtime.output_dir,
        "job": [job.job.name, OmegaConf.select(job, "job.num", throw_on_missing=False)],
        "cwd": os.getcwd(),
        "world_size": [trainer.world_size, dist.get_world_size() if dist.is_initialized() else 1],
        "interpreter": [
            sys.flags.bytes_warning,
            sys._xoptions.get("mine"),
            "ignore" in sys.warnoptions,
        ],
        "argv": sys.argv,
        "pid": os.getpid(),
    }
    Path(job.runtime.output_dir, f"rank{trainer.global_rank}.json").write_text(json.dumps(told))
    return float(cfg.foo)


if __name__ == "__main__":
    assert lightning_dp
    before = dict(os.environ)
    try:
        main()
    finally:
        names = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}
        print("ENVIRONMENT", sorted(names & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"}))
