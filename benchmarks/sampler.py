"""Planning an epoch's order and handing out batches, beside torch's DistributedSampler.

    python -m benchmarks.sampler --samples 1e6 1e8 --world 8 --batch 64

Each contender runs in a process of its own, as one rank of ``world``: the time until the first batch is
there, the processor time of each later batch, and how much the process grew. torch's row is
``BatchSampler(DistributedSampler(...))``, which is what Lightning's ``ddp`` installs. The times exclude
loading data.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_dp.data.loader import LoaderParts, Shard
from lightning_dp.data.share import Cursor
from lightning_dp.data.train_batches import TrainBatches

MAX_BATCHES = 20_000


class Sized:
    """A dataset of which nothing but the length is needed."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n


def torch_batches(n, world, batch, start):
    sampler = DistributedSampler(Sized(n), world, 3 % world, shuffle=True, seed=1)
    sampler.set_epoch(2)
    return iter(BatchSampler(sampler, batch, False))


def our_batches(n, world, batch, start, **kwargs):
    loader = DataLoader(Sized(n), batch_size=batch, **(kwargs or {"shuffle": True}))
    shard = Shard(3 % world, world, seed=1)
    return iter(TrainBatches(LoaderParts.of(loader), shard, Cursor(2, 0, start)))


def sequential(n, world, batch, start):
    return our_batches(n, world, batch, start, shuffle=False)


CONTENDERS = {
    "torch": (torch_batches, 0.0),
    "lean": (our_batches, 0.0),
    "lean, resumed": (our_batches, 0.5),
    "lean, in order": (sequential, 0.0),
}


def measure(make, n, world, batch, part):
    """Seconds to the first batch, microseconds a batch, MiB: in a process of its own."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.process_time()
        batches = make(n, world, batch, int(n * part))
        next(batches)
        planned = time.process_time() - begin
        begin, count = time.process_time(), 0
        for _ in batches:
            count += 1
            if count == MAX_BATCHES:
                break
        each = (time.process_time() - begin) / max(count, 1) * 1e6
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        os.write(send, f"{planned} {each} {grown}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(send)
    with os.fdopen(receive) as answer:
        return [float(value) for value in answer.read().split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=float, nargs="+", default=[1e6, 1e7, 5e7, 1e8])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one rank of {args.world}, {args.batch} samples a batch, processor time")
    print(f"{'samples':>10}  {'':16}{'plan s':>8}{'us a batch':>12}{'MiB':>8}")
    for samples in args.samples:
        for name, (make, part) in CONTENDERS.items():
            planned, each, grown = measure(make, int(samples), args.world, args.batch, part)
            print(
                f"{int(samples):>10}  {name:16}{planned:>8.2f}{each:>12.1f}{grown:>8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
