"""Train any LightningModule on two ranks: python examples/minimal.py."""

import lightning as L

import lightning_dp  # noqa: F401  (registers the strategy's names)
from lightning_dp.demos.digits import DigitsDataModule, DigitsModule

if __name__ == "__main__":
    L.seed_everything(42, workers=True)
    trainer = L.Trainer(
        strategy="lean_ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=10,
        logger=False,
        default_root_dir="outputs/minimal",
    )
    model, data = DigitsModule(), DigitsDataModule()
    trainer.fit(model, data)
    trainer.test(model, data)
