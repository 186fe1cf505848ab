"""The optimizer's state in shares beside ``ddp``, ``lean_ddp`` and other ways to share it, with AdamW.

    python -m benchmarks.zero --ranks 2 --models transformer
    bash benchmarks/hosts.sh 1gbit 2 python -m benchmarks.zero --models transformer

For each contender: milliseconds of a step (the median of a fit, and its ratio to ``ddp`` within a round),
bytes that a rank sends in a step for each parameter, bytes of state that a rank holds for each parameter,
seconds to save a checkpoint (where a Trainer runs). Bytes are counted at the network interface, so they are
there between test hosts only. What is not installed is printed as not run, and why.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.models import Job, job
from benchmarks.step_time import Clock, bare_trainer, facts, launch, quiet
from benchmarks.zero_peers import DEEPSPEED, FSDP2, PEERS, one_loop, why_not

LR = 1e-4
WARM_UP = 4
STRATEGIES = {
    "ddp": "ddp",
    "lean": "lean",
    "lean zero=1": "lean:zero=1",
    "lean zero=1, gather forward": 'lean:zero={"gather":"forward"}',
    "lean zero=1, all gradients": 'lean:zero={"gradients":"all"}',
    "lean zero=1, process group": "lean:zero=1,shared_memory=false",
    "lean, process group": "lean:shared_memory=false",
    "torch ZeroRedundancyOptimizer": "ddp",
    FSDP2: "",
    DEEPSPEED: "",
}


class AdamJob(Job):
    """A benchmark's job with AdamW, or torch's sharded one around it."""

    def __init__(self, other: Job, *, zero: bool) -> None:
        super().__init__(other.net, other.batch)
        self.zero = zero

    def configure_optimizers(self):
        if self.zero:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=LR)
        return torch.optim.AdamW(self.parameters(), lr=LR)


class Traffic(pl.Callback):
    """Bytes that this host has sent, step by step, and what a rank holds at the end."""

    def __init__(self, folder):
        self.sent, self.held, self.save_s = [], 0, 0.0
        self.folder = folder

    def on_train_batch_start(self, *_):
        self.sent.append(sent_bytes())

    def on_train_end(self, trainer, module):
        (optimizer,) = trainer.optimizers
        optimizer = getattr(
            optimizer, "optim", optimizer
        )  # torch's sharded one keeps another inside
        self.held = sum(
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        )
        begin = time.perf_counter()
        trainer.save_checkpoint(self.folder / "measured.ckpt")
        self.save_s = time.perf_counter() - begin


def sent_bytes() -> int | None:
    """What the interface of this test host has sent; ``None`` where ranks share a host."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    counter = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return int(counter.read_text()) if name not in ("", "lo") and counter.exists() else None


def one_fit(name, model, steps, world_size, folder):
    if name in PEERS:
        return *one_loop(name, job(model), LR, steps, WARM_UP, sent_bytes), float("nan")
    module = AdamJob(job(model), zero=name.startswith("torch"))
    clock, traffic = Clock(WARM_UP), Traffic(folder)
    text = STRATEGIES[name]
    trainer = bare_trainer(text, world_size, clock, traffic)
    trainer.fit(module, module.loader(steps + WARM_UP + 1))
    parameters = sum(p.numel() for p in module.parameters())
    sent = traffic.sent
    per_step = None
    if sent[0] is not None:
        per_step = (sent[-1] - sent[WARM_UP]) / (len(sent) - 1 - WARM_UP) / parameters
    return 1e3 * statistics.median(clock.wall), per_step, traffic.held / parameters, traffic.save_s


def measure(args):
    """Run as one rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.ranks, args.accumulate = world_size, 1
    os.environ.setdefault("LOCAL_RANK", str(rank))
    if args.pin:
        os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(args.threads)
    names = [name for name in args.contenders if why_not(name) is None]
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            rounds = {name: [] for name in names}
            for number in range(args.rounds):
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    ms, sent, held, save_s = one_fit(
                        name, model, args.steps, world_size, Path(folder)
                    )
                    slowest = torch.tensor([ms, held, save_s])
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    rounds[name].append((*slowest.tolist(), sent))
            if rank == 0:
                table(model, rounds, args)
    dist.barrier()
    dist.destroy_process_group()


def table(model, rounds, args):
    print(
        f"\n{model}, {args.ranks} ranks, link {args.link}, {args.rounds} rounds of {args.steps} steps"
    )
    print(f"{'contender':<34}{'ms':>9}{'ratio':>8}{'sent B/p':>10}{'state B/p':>11}{'save s':>9}")
    base = next(iter(rounds.values()))
    for name in args.contenders:
        if name not in rounds:
            print(f"{name:<34} not run: {why_not(name)}")
            continue
        values = rounds[name]
        row = {
            "model": model,
            "contender": name,
            "ms": statistics.median(v[0] for v in values),
            "ratio": statistics.median(v[0] / b[0] for v, b in zip(values, base, strict=True)),
            "sent": values[-1][3],
            "state": values[-1][1],
            "save_s": statistics.median(v[2] for v in values),
        }
        sent = "-" if row["sent"] is None else f"{row['sent']:.2f}"
        print(
            f"{name:<34}{row['ms']:>9.1f}{row['ratio']:>8.2f}{sent:>10}{row['state']:>11.2f}"
            f"{row['save_s']:>9.2f}"
        )
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps({**row, **facts(args)}) + "\n")


def main():
    """Start ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["transformer"])
    parser.add_argument("--contenders", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="one core a rank")
    parser.add_argument("--link", default="loopback", help="named in the output")
    parser.add_argument("--out", help="append results to this file")
    args = parser.parse_args()
    with quiet():
        if "RANK" in os.environ:
            measure(args)
        else:
            launch(args)


if __name__ == "__main__":
    main()
