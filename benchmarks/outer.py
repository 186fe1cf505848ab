"""What few meetings cost in accuracy, on the bytes demo: bits per byte of files that are not trained on.

    python -m benchmarks.outer [--ranks 2 4] [--steps 600] [--every 20] [--seeds 3]

Synchronous training, DiLoCo, averaging of weights, and one rank alone, each with the same optimizer
steps and the same batch a rank. Of a synchronous run's bytes travel 1, 1/every, 1/every and 0.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings

import lightning.pytorch as pl

from lightning_dp import LeanDDPStrategy
from lightning_dp.demos.bytes import BytesDataModule, BytesModule

LENGTH, BATCH = 64, 8


def bits_per_byte(ranks: int, steps: int, seed: int, outer: dict | None) -> float:
    """Train; return the last validation's result."""
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=LeanDDPStrategy(start_method="fork", outer=outer),
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = BytesModule(width=64, depth=2, length=LENGTH)
    data = BytesDataModule(batch_size=BATCH, length=LENGTH, max_eval_bytes=65536)
    trainer.fit(module, data)
    return float(trainer.callback_metrics["val/bits_per_byte"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    averaging = {"lr": 1.0, "momentum": 0}
    for ranks in args.ranks:
        methods = {
            "synchronous": (ranks, None),
            f"DiLoCo, every {args.every}": (ranks, {"every": args.every}),
            f"averaging, every {args.every}": (
                ranks,
                {"every": args.every, "optimizer": averaging},
            ),
            "one rank alone": (1, None),
        }
        print(f"{ranks} ranks, {args.steps} steps, batch {BATCH} a rank: bits per byte", flush=True)
        means = []
        for name, (number, outer) in methods.items():
            found = [bits_per_byte(number, args.steps, seed, outer) for seed in range(args.seeds)]
            means.append(statistics.mean(found))
            by_seed = ", ".join(f"{bits:.3f}" for bits in found)
            print(f"  {name:24} {means[-1]:.3f}   by seed {by_seed}", flush=True)
        print(f"  in the order that is expected: {means == sorted(means)}", flush=True)


if __name__ == "__main__":
    main()
