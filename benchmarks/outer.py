"""What few meetings cost in accuracy, on the bytes demo: bits per byte of files that are not trained on.

    python -m benchmarks.outer [--ranks 2 4] [--steps 600] [--every 20] [--seeds 0 1 2] [--streaming]

Synchronous training, DiLoCo, averaging of weights, and one rank alone, each with the same model, optimizer,
schedule, steps and batch a rank; so all but the last see the same data, and the last one its first rank's
share. Beside the result stands what a rank sends in a step, in KiB of gradients or changes.

The order needs steps: in the first few rounds the outer momentum makes up for a learning rate that is still
rising, and DiLoCo is ahead of synchronous training.
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


class Traffic(pl.Callback):
    """Adds up the bytes of all reductions."""

    def __init__(self) -> None:
        self.last, self.bytes = None, 0

    def on_train_batch_end(self, trainer, *_) -> None:
        times = trainer.strategy.watch_collectives(False)
        if times is not self.last:
            self.last = times
            self.bytes += sum(bucket.nbytes for bucket in times.buckets)

    def on_validation_epoch_end(self, trainer, module) -> None:
        module.log("sent", self.bytes / trainer.global_step)  # metrics come back from forked ranks


def train(ranks: int, steps: int, seed: int, outer: dict | None) -> tuple[float, float]:
    """Train; return the last validation's bits per byte, and bytes sent in a step."""
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
        callbacks=[Traffic()],
    )
    module = BytesModule(width=64, depth=2, length=LENGTH)
    data = BytesDataModule(batch_size=BATCH, length=LENGTH, max_eval_bytes=65536)
    trainer.fit(module, data)
    found = trainer.callback_metrics
    return float(found["val/bits_per_byte"]), float(found["sent"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--streaming", action="store_true", help="also in three fragments")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    diloco = {"every": args.every}
    expected = {
        "synchronous": None,
        f"DiLoCo, every {args.every}": diloco,
        f"averaging, every {args.every}": {**diloco, "optimizer": {"lr": 1.0, "momentum": 0}},
        "one rank alone": None,
    }
    streaming = {**diloco, "fragments": 3, "delay": 2, "mix": 0.5}
    for ranks in args.ranks:
        print(f"{ranks} ranks, {args.steps} steps, batch {BATCH} a rank: bits per byte", flush=True)
        methods = {**expected, **({"streaming": streaming} if args.streaming else {})}
        means = {}
        for name, outer in methods.items():
            number = 1 if name == "one rank alone" else ranks
            found, sent = zip(
                *(train(number, args.steps, seed, outer) for seed in args.seeds), strict=True
            )
            means[name] = statistics.mean(found)
            by_seed = ", ".join(f"{bits:.3f}" for bits in found)
            print(
                f"  {name:24} {means[name]:.3f}   by seed {by_seed}   {sent[0] / 1024:7.1f} KiB a step",
                flush=True,
            )
        order = [means[name] for name in expected]
        print(f"  in the order that is expected: {order == sorted(order)}", flush=True)


if __name__ == "__main__":
    main()
