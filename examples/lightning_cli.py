"""Every option of the strategy on LightningCLI's command line, in its help and in its config files.

python examples/lightning_cli.py fit --trainer.devices 2 --trainer.strategy lean_ddp
python examples/lightning_cli.py fit --trainer.devices 2 \
    --trainer.strategy lightning_dp.LeanDDPStrategy --trainer.strategy.bucket_cap_mb 8
python examples/lightning_cli.py fit --trainer.strategy.help lightning_dp.LeanDDPStrategy
"""

from lightning.pytorch.cli import LightningCLI

import lightning_dp  # noqa: F401  (registers the strategy's names)
from lightning_dp.demos.digits import DigitsDataModule, DigitsModule

if __name__ == "__main__":
    LightningCLI(
        DigitsModule,
        DigitsDataModule,
        trainer_defaults={"accelerator": "cpu", "max_epochs": 2, "logger": False},
        seed_everything_default=42,
    )
