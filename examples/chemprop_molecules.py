"""A library built on lightning, fitted by a Trainer of one's own: python examples/chemprop_molecules.py.

Needs ``pip install chemprop``. Learns how many carbon atoms a chain has, from its graph.
"""

import lightning as L
from chemprop import data, models
from chemprop import nn as parts

import lightning_dp  # noqa: F401  (registers the strategy's names)

if __name__ == "__main__":
    L.seed_everything(1)
    rows = [data.MoleculeDatapoint.from_smi("C" * n + "O", [n / 10]) for n in range(1, 11)] * 8
    loader = data.build_dataloader(data.MoleculeDataset(rows), batch_size=10, num_workers=0)
    module = models.MPNN(
        parts.BondMessagePassing(d_h=32),
        parts.SumAggregation(),
        parts.RegressionFFN(input_dim=32, hidden_dim=32),
        batch_norm=False,
    )
    trainer = L.Trainer(
        strategy="lean_ddp", accelerator="cpu", devices=2, max_epochs=20, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    print(f"rank {trainer.global_rank}: loss {trainer.callback_metrics['train_loss']:.4f}")
