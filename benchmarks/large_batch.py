"""The demos at 1, 4, 8 and 16 times a batch, with the learning-rate rule and without, at equal samples.

    python -m benchmarks.large_batch --out benchmarks/results/large_batch      # about an hour on one core
    python -m benchmarks.large_batch --demos digits --factors 1 4 --samples 2000

One rank and two micro-batches a batch. Prints the final validation metric of each run and what the
noise scale said, and with ``--out`` writes OUT.jsonl and OUT.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_dp import LRScaling, NoiseScale
from lightning_dp.demos.bytes import BytesDataModule, BytesModule
from lightning_dp.demos.digits import DigitsDataModule, DigitsModule
from lightning_dp.internals.lightning import Callback

# Both use AdamW, for which the rule is the square root. A batch is two micro-batches, so that the noise
# scale can be measured on one rank. The smallest is far below it, so that several times as much is too.
BASE = {"digits": 16, "bytes": 2}
USUAL = 16  # the batch for which the demos' own learning rates and warm-ups were chosen
SAMPLES = {"digits": 15 * 1200, "bytes": 16_000}
METRIC = {"digits": "val/loss", "bytes": "val/bits_per_byte"}


def parts(demo: str, batch: int) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """A module whose learning rate is right for the smallest batch, and data."""
    smallest = (BASE[demo] / USUAL) ** 0.5
    if demo == "digits":
        module = DigitsModule()
        module.lr *= smallest
        return module, DigitsDataModule(batch_size=batch // 2)
    # Its own warm-up is counted in steps, of which a larger batch makes fewer.
    module = BytesModule(lr=3e-3 * smallest, warmup_steps=max(2, 50 * USUAL // batch))
    return module, BytesDataModule(batch_size=batch // 2, max_eval_bytes=65536)


def run(demo: str, factor: int, rule: str, samples: int, seed: int) -> dict[str, Any]:
    pl.seed_everything(seed, verbose=False)
    base = BASE[demo]
    module, data = parts(demo, base * factor)
    steps = max(4, samples // (base * factor))
    noise = NoiseScale(decay=0.98)
    callbacks: list[Callback] = [noise]
    if rule != "none":
        callbacks.append(LRScaling(rule=rule, base_batch=base, warmup_steps=max(1, steps // 10)))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="lean_ddp", max_steps=steps, max_epochs=-1,
        accumulate_grad_batches=2, gradient_clip_val=1.0, limit_val_batches=0, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, data, verbose=False)
    found = noise.estimate
    return {
        "demo": demo, "batch": base * factor, "factor": factor, "rule": rule, "steps": steps, "seed": seed,
        "metric": METRIC[demo], "value": float(trainer.callback_metrics[METRIC[demo]]),
        "noise_scale": found and found.value, "low": found and found.low, "high": found and found.high,
    }  # fmt: skip


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    demos = list(dict.fromkeys(row["demo"] for row in rows))
    figure = Figure(figsize=(5.2 * len(demos), 4), layout="constrained")
    for axis, demo in zip(figure.subplots(1, len(demos), squeeze=False)[0], demos, strict=True):
        mine = [row for row in rows if row["demo"] == demo]
        for rule in dict.fromkeys(row["rule"] for row in mine):
            by_batch: dict[int, list[float]] = {}
            for row in mine:
                if row["rule"] == rule:
                    by_batch.setdefault(row["batch"], []).append(row["value"])
            means = {batch: sum(values) / len(values) for batch, values in by_batch.items()}
            label = "as it is" if rule == "none" else f"{rule} rule"
            axis.plot(list(means), list(means.values()), marker="o", label=label)
        scales = [row["noise_scale"] for row in mine if row["factor"] == 1 and row["noise_scale"]]
        if scales:
            axis.axvline(
                sum(scales) / len(scales), color="grey", linestyle="--", label="noise scale"
            )
        axis.set_xscale("log", base=2)
        axis.set_title(f"{demo}: {METRIC[demo]} after equal samples")
        axis.set_xlabel("batch")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--demos", nargs="+", choices=list(BASE), default=list(BASE))
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--rules", nargs="+", default=["none", "sqrt"])
    parser.add_argument("--samples", type=int, help="of each run; by default those of the demo")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="without a suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = []
    print(
        f"{'demo':<8}{'batch':>7}{'rule':>7}{'steps':>7}{'seed':>6}{'value':>9}{'noise scale (95 %)':>30}"
    )
    for demo in args.demos:
        for factor in args.factors:
            for rule in args.rules if factor > 1 else ["none"]:
                for seed in args.seeds:
                    row = run(demo, factor, rule, args.samples or SAMPLES[demo], seed)
                    rows.append(row)
                    scale = ""
                    if row["noise_scale"] is not None:
                        scale = f"{row['noise_scale']:.0f} ({row['low']:.0f} to {row['high']:.0f})"
                    print(
                        f"{demo:<8}{row['batch']:>7}{rule:>7}{row['steps']:>7}{seed:>6}{row['value']:>9.4f}"
                        f"{scale:>30}",
                        flush=True,
                    )
    if args.out:
        args.out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        both = [{**row, "rule": rule} for row in rows if row["factor"] == 1 for rule in args.rules]
        draw(both + [row for row in rows if row["factor"] > 1], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
