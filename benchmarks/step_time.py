"""Step time of ``lean_ddp`` beside Lightning's ``ddp``, in paired rounds of one launch.

    python benchmarks/step_time.py --ranks 2 --models transformer mlp
    bash benchmarks/hosts.sh 1gbit 2 python benchmarks/step_time.py --models transformer mlp

Every rank runs short fits of all contenders in turn, round after round, and takes the median of each
fit's steps (from one batch's start to the next one's: forward, backward, optimizer and everything that
the Trainer and the strategy do in between). What is quoted is the ratio to ``ddp`` *within a round*:
the machine's drift hits both. The spread is that of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.models import free_port, job
from lightning_dp import LeanDDPStrategy

WARM_UP = 4


class NoSync(DDPStrategy):
    """Every rank alone: what a step costs without any synchronisation."""

    def configure_ddp(self):
        pass


class Hooked(DDPStrategy):
    """``ddp`` with a communication hook on any device: Lightning silently registers none on a CPU."""

    def _register_ddp_hooks(self):
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


HOOKS = {
    "fp16": lambda: {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "bf16": lambda: {"ddp_comm_hook": default_hooks.bf16_compress_hook},
    # One bucket: over gloo its collectives of several would meet in another order on each rank.
    "powerSGD": lambda: {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2),
        "bucket_cap_mb": 1000,
    },
}


def contender(name: str):
    """Make a strategy from its name: ``ddp:bucket_cap_mb=2``, ``hook:fp16``, ``lean``, ``alone``."""
    kind, _, text = name.partition(":")
    if kind == "hook":
        return Hooked(cluster_environment=LightningEnvironment(), **HOOKS[text]())
    parts = re.split(r",(?![^{]*})", text)  # not inside a mapping
    options = dict(part.split("=", 1) for part in parts if part)
    options = {key: json.loads(value) for key, value in options.items()}
    cls = {"ddp": DDPStrategy, "lean": LeanDDPStrategy, "alone": NoSync}[kind]
    return cls(cluster_environment=LightningEnvironment(), **options)


class Clock(pl.Callback):
    """Wall and processor time from one batch's start to the next one's, after a warm-up."""

    def __init__(self, warm_up):
        self.warm_up = warm_up  # batches
        self.wall, self.cpu = [], []
        self.bytes = self.exposed = None

    def on_train_batch_start(self, trainer, *_):
        now, cpu = time.perf_counter(), time.process_time()
        if trainer.fit_loop.epoch_loop.batch_idx > self.warm_up:
            self.wall.append(now - self.last[0])
            self.cpu.append(cpu - self.last[1])
        self.last = (now, cpu)

    def on_train_end(self, trainer, module):
        read = getattr(trainer.strategy, "step_stats", None)
        stats = read() if read is not None else None
        if stats is not None:
            self.bytes, self.exposed = stats.bytes, stats.exposed_ms


def bare_trainer(name, world_size, *callbacks, device="cpu", **more):
    """Make a Trainer that does nothing besides training: what is measured is the strategy ``name``."""
    return pl.Trainer(
        strategy=contender(name),
        accelerator=device,
        devices=world_size,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **more,
    )


def one_fit(name, model, args):
    module, steps, accumulate = job(model), args.steps, args.accumulate
    clock = Clock(args.warm_up * accumulate)
    trainer = bare_trainer(
        name, args.ranks, clock, device=args.device, accumulate_grad_batches=accumulate
    )
    # What the fits before left would be collected in the midst of this one, on each rank at another step:
    # 0.2 s, more than ten steps of the small models.
    gc.collect()
    gc.freeze()
    trainer.fit(module, module.loader((steps + args.warm_up) * accumulate + 1))
    gc.unfreeze()

    def per_step(values):
        """Milliseconds of an optimizer step: a window's batches together, the median window or the mean."""
        windows = [sum(values[i : i + accumulate]) for i in range(0, len(values), accumulate)]
        return 1e3 * (statistics.mean if args.mean else statistics.median)(windows)

    return per_step(clock.wall), per_step(clock.cpu), clock.bytes, clock.exposed


@contextmanager
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_dp").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    yield


def spread(values):
    values = sorted(values)
    if len(values) < 4:
        return f"{values[0]:.2f}..{values[-1]:.2f}"
    quarter = len(values) // 4
    return f"{values[quarter]:.2f}..{values[-1 - quarter]:.2f}"


def measure(args):
    """Run as one rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.ranks = world_size  # Lightning's environment forgets its variables after each fit
    os.environ.setdefault("LOCAL_RANK", str(rank))
    if args.pin:
        os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(args.threads)
    results = []
    for model in args.models:
        rounds = {name: [] for name in args.contenders}
        for number in range(args.rounds):
            order = list(args.contenders)
            order = order[number % len(order) :] + order[: number % len(order)]
            for name in order:
                wall, cpu, nbytes, exposed = one_fit(name, model, args)
                both = torch.tensor([wall, cpu])
                dist.all_reduce(both, op=dist.ReduceOp.MAX)  # the slowest rank is the step
                rounds[name].append((*both.tolist(), nbytes, exposed))
        base = rounds[args.contenders[0]]
        for name, values in rounds.items():
            ratios = [v[0] / b[0] for v, b in zip(values, base, strict=True)]
            cpu_ratios = [v[1] / b[1] for v, b in zip(values, base, strict=True)]
            exposed = [v[3] for v in values if v[3] is not None]
            results.append(
                {
                    "model": model,
                    "contender": name,
                    "ms": statistics.median(v[0] for v in values),
                    "ratio": statistics.median(ratios),
                    "spread": spread(ratios),
                    "cpu_ms": statistics.median(v[1] for v in values),
                    "cpu_ratio": statistics.median(cpu_ratios),
                    "exposed_ms": statistics.median(exposed) if exposed else None,
                    "bytes": values[-1][2],
                }
            )
        if rank == 0:
            table(results[-len(rounds) :], args)
    if rank == 0 and args.out:
        with open(args.out, "a") as f:
            for row in results:
                f.write(json.dumps({**row, **facts(args)}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def facts(args):
    return {
        "link": args.link,
        "ranks": args.ranks,
        "accumulate": args.accumulate,
        "rounds": args.rounds,
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows, args):
    print(
        f"\n{rows[0]['model']}, {args.ranks} ranks, link {args.link},"
        f" accumulate {args.accumulate}, {args.rounds} rounds of {args.steps} steps"
    )
    print(
        f"{'contender':<34}{'ms':>9}{'ratio':>8}  {'quartiles':<12}{'cpu ms':>9}{'ratio':>7}{'exposed':>9}"
    )
    for row in rows:
        exposed = "" if row["exposed_ms"] is None else f"{row['exposed_ms']:.1f}"
        print(
            f"{row['contender']:<34}{row['ms']:>9.1f}{row['ratio']:>8.3f}  {row['spread']:<12}"
            f"{row['cpu_ms']:>9.1f}{row['cpu_ratio']:>7.2f}{exposed:>9}",
            flush=True,
        )


def launch(args):
    """Start this script once per rank on this machine."""
    port = free_port()
    ranks = []
    for rank in range(args.ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(args.threads),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p) or ".",
        }
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    codes = [process.wait() for process in ranks]
    sys.exit(max(map(abs, codes)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--models", nargs="+", default=["small", "mlp", "transformer", "cnn", "gpt"]
    )
    parser.add_argument("--contenders", nargs="+", default=["ddp", "lean", "alone"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that do not count")
    parser.add_argument(
        "--mean", action="store_true", help="not the median: where one step in many does more"
    )
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--link", default="loopback", help="only a label; hosts.sh sets the rate")
    parser.add_argument("--pin", action="store_true", help="one core a rank")
    parser.add_argument("--out", help="append results to this file, a JSON object a line")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        launch(args)
    with quiet():
        measure(args)


if __name__ == "__main__":
    main()
