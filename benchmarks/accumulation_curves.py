"""Loss curves of one language model at one global batch, cut up in three ways, on uneven sequences.

    python -m benchmarks.accumulation_curves            # writes docs/accumulation_curves.png

The global batch is 16 pieces of Python's own library, 4 to 128 bytes long, padded. It is run as
(1 rank, window 1), (2 ranks, window 1) and (2 ranks, window 4), in float64, so that only arithmetic can
make a difference. What is drawn is the mean loss per byte of the whole global batch at each step, and
its distance from the one-rank run. ``lean_ddp`` gets each micro-batch's number of bytes as its weight;
``ddp`` has no way to be told, and averages means.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.models import free_port
from benchmarks.step_time import bare_trainer, quiet
from lightning_dp.demos.bytes import BytesModule, read_corpus

GLOBAL_BATCH = 16
PAD = -100
RUNS = [("lean_ddp", 1, 1), ("lean_ddp", 2, 1), ("lean_ddp", 2, 4), ("ddp", 2, 1), ("ddp", 2, 4)]


class Language(pl.LightningModule):
    """The demo's GPT, with a mean loss over the bytes that are not padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gpt = BytesModule(width=32, depth=2, num_heads=2, length=128).double()
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.curve = []

    def training_step(self, batch, batch_idx):
        target = batch[:, 1:].clone()
        scores = self.gpt(batch[:, :-1].clamp(min=0))
        count = int((target != PAD).sum())
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD)
        self.sums += torch.tensor([float(loss.detach()) * count, count], dtype=torch.float64)
        return {"loss": loss, "loss_weight": count}

    def on_before_optimizer_step(self, optimizer):
        total = self.sums.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        self.curve.append(float(total[0] / total[1]))
        self.sums.zero_()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def sequences(steps):
    """The same pieces of text in every run: ``steps`` global batches, padded to 129 bytes."""
    text = read_corpus("train").long()
    draw = random.Random(0)
    batch = torch.full((steps * GLOBAL_BATCH, 129), PAD)
    for row in batch:
        length = draw.choice([4, 8, 16, 128])
        start = draw.randrange(len(text) - 130)
        row[: length + 1] = text[start : start + length + 1]
    return batch


def rank_main(rank, kind, world_size, window, port, steps, out):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    micro = GLOBAL_BATCH // (world_size * window)
    pieces = sequences(steps).view(steps, window, world_size, micro, -1)
    module = Language()
    with quiet():
        kind = kind.removesuffix("_ddp")
        trainer = bare_trainer(kind, world_size, accumulate_grad_batches=window)
        trainer.fit(module, DataLoader(pieces[:, :, rank].flatten(0, 1), batch_size=None))
    if rank == 0:
        Path(out).write_text(json.dumps(module.curve))


def run(kind, world_size, window, steps):
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/curve.json"
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=rank_main, args=(r, kind, world_size, window, port, steps, out))
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank of {kind}, {world_size} rank(s), window {window} failed")
        return json.loads(Path(out).read_text())


def draw(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    reference = torch.tensor(curves[RUNS[0]], dtype=torch.float64)
    for (kind, world_size, window), curve in curves.items():
        label = f"{kind}, {world_size} rank{'s' * (world_size > 1)}, window {window}"
        style = "-" if kind == "lean_ddp" else "--"
        left.plot(curve, style, label=label, linewidth=1)
        distance = (torch.tensor(curve, dtype=torch.float64) - reference).abs().clamp(min=1e-16)
        if (kind, world_size, window) != RUNS[0]:
            right.semilogy(distance, style, label=label, linewidth=1)
    left.set(
        xlabel="optimizer step", ylabel="loss per byte (nats)", title="One global batch, cut up"
    )
    right.set(
        xlabel="optimizer step", ylabel="|loss - loss of one rank|", title="Distance from one rank"
    )
    right.axhline(1e-6, color="grey", linewidth=0.7)
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="docs/accumulation_curves.png")
    args = parser.parse_args()
    curves = {key: run(*key, args.steps) for key in RUNS}
    reference = torch.tensor(curves[RUNS[0]], dtype=torch.float64)
    for key, curve in curves.items():
        distance = float((torch.tensor(curve, dtype=torch.float64) - reference).abs().max())
        print(
            f"{key[0]:<9} ranks {key[1]} window {key[2]}: last loss {curve[-1]:.6f},"
            f" largest distance from one rank {distance:.1e}"
        )
    Path(args.out).parent.mkdir(exist_ok=True)
    draw(curves, args.out)
    print(f"drawn: {args.out}")


if __name__ == "__main__":
    main()
