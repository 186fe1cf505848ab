"""A Hydra project of your own that takes the strategy, and nothing else, from lightning_dp.

python train.py trainer.devices=2
python train.py trainer.strategy.bucket_cap_mb=8
torchrun --nproc-per-node 2 train.py trainer.devices=2
"""

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    L.seed_everything(cfg.seed, workers=True)
    trainer = instantiate(cfg.trainer)
    trainer.fit(instantiate(cfg.model), instantiate(cfg.data))
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["loss"])
        print(
            f"{type(trainer.strategy).__name__} on {trainer.world_size} ranks, last loss {loss:.4f}"
        )


if __name__ == "__main__":
    main()
