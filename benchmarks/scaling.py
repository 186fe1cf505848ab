"""What the engine costs as parameters, buckets and ranks grow, beside torch's DDP.

    python -m benchmarks.scaling

No Trainer here: backward of one module under (a) nothing, (b) torch's DistributedDataParallel and (c)
our Reducer, in turn, in one launch. Processor time of the training thread's process, because it does
not count what other programs take from the core; waiting for the wire is not processor time either.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import Small, free_port
from benchmarks.step_time import spread
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire

MIB = 2**20


class Alone:
    """No synchronisation."""

    def __init__(self, module, cap_mib):
        self.module = module

    def step(self, x):
        self.module.zero_grad()
        loss = self.module(x).square().mean()
        wall, cpu = time.perf_counter(), time.process_time()
        self.backward(loss)
        return time.perf_counter() - wall, time.process_time() - cpu

    def backward(self, loss):
        loss.backward()

    def close(self):
        pass


class Ddp(Alone):
    """torch's DistributedDataParallel."""

    view = False

    def __init__(self, module, cap_mib):
        self.module = DistributedDataParallel(
            module, bucket_cap_mb=cap_mib, gradient_as_bucket_view=self.view
        )


class View(Ddp):
    """The same, with gradients that are views of its buckets: its cheapest setting."""

    view = True


class Lean(Alone):
    """Our reducer."""

    def __init__(self, module, cap_mib):
        self.module = module
        cap = int(cap_mib * MIB)
        self.window = AccumulationWindow()
        group = ReplicaGroup.create(torch.device("cpu"))
        options = LayoutOptions(cap_bytes=cap, first_bytes=min(cap, MIB), last_bytes=min(cap, MIB))
        wire = SharedMemoryWire.connect(group)
        self.reducer = Reducer(module, group, self.window, wire, options)

    def backward(self, loss):
        self.window.add(1.0, loss)
        self.reducer.arm(loss)
        loss.backward()

    def close(self):
        self.reducer.close()


KINDS = {"alone": Alone, "ddp": Ddp, "view": View, "lean": Lean}


def compare(make, x, cap_mib, rounds, steps):
    """Median milliseconds of a backward, processor and wall, by kind; ratios of lean to both of torch."""
    cpu = {kind: [] for kind in KINDS}
    wall = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, cls in KINDS.items():
            torch.manual_seed(0)
            one = cls(make(), cap_mib)
            times = [one.step(x) for _ in range(steps + 4)][4:]
            one.close()
            wall[kind].append(1e3 * statistics.median(t[0] for t in times))
            cpu[kind].append(1e3 * statistics.median(t[1] for t in times))
    ratios = {
        kind: [a / b for a, b in zip(cpu["lean"], cpu[kind], strict=True)]
        for kind in ("ddp", "view")
    }
    return (
        {kind: statistics.median(values) for kind, values in cpu.items()},
        {kind: statistics.median(values) for kind, values in wall.items()},
        ratios,
    )


def measure(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(4, 8)
    rows = []
    for parameters in args.parameters:
        cpu, wall, ratios = compare(lambda n=parameters: Small(n), x, 25, args.rounds, args.steps)
        rows.append(("parameters", parameters, parameters, cpu, wall, ratios))
    wide = torch.randn(2, 256)
    for cap_mib in args.caps:
        make = lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(64)])  # noqa: E731
        cpu, wall, ratios = compare(make, wide, cap_mib, args.rounds, args.steps)
        buckets = max(1, round(16 / cap_mib))
        rows.append(("cap MiB (16 MiB of gradients)", cap_mib, buckets, cpu, wall, ratios))
    if rank == 0:
        print(f"\n{world_size} ranks, backward only, median of {args.rounds} rounds")
        print("processor time in ms; what synchronising adds, in us a parameter or a bucket")
        print(
            f"{'what':<31}{'n':>7}{'alone':>9}{'ddp':>9}{'view':>9}{'lean':>9}{'+ddp us':>9}{'+lean us':>9}"
            f"{'lean/ddp':>10}  {'spread':<11}{'lean/view':>10}  spread"
        )
        for what, n, count, cpu, wall, ratios in rows:
            added = [1e3 * (cpu[kind] - cpu["alone"]) / count for kind in ("ddp", "lean")]
            print(
                f"{what:<31}{n:>7}{''.join(f'{cpu[kind]:>9.2f}' for kind in KINDS)}"
                f"{added[0]:>9.1f}{added[1]:>9.1f}"
                + "".join(
                    f"{statistics.median(r):>10.3f}  {spread(r):<11}" for r in ratios.values()
                )
            )
            if args.out:
                with open(args.out, "a") as f:
                    row = {"what": what, "n": n, "cpu_ms": cpu, "wall_ms": wall, "ratios": ratios}
                    f.write(json.dumps({**row, "ranks": world_size}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def launch(args, world_size):
    port = free_port()
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base |= {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:]],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    if any(process.wait() for process in ranks):
        raise SystemExit("a rank failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 1])
    parser.add_argument("--parameters", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--caps", type=float, nargs="+", default=[25, 4, 1, 0.25])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return
    for world_size in args.worlds:
        launch(args, world_size)


if __name__ == "__main__":
    main()
