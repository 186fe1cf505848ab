"""What ``lean-ddp plan`` predicts beside what is measured: other rates, more hosts, one machine.

    python -m benchmarks.plan                     # all of it: needs root and iproute2, and a quiet machine
    python -m benchmarks.plan --rates 1gbit --hosts 2 --models gpt --steps 4 --rounds 1

One rank on one core gives the profile; nothing of the measured runs goes into a prediction. Writes a table,
and with ``--out`` a JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.models import job
from lightning_dp.engine.plan.cost import HOST_S_PER_BUCKET, Fabric
from lightning_dp.measure.forecast import Job, RunProfile, forecast
from lightning_dp.measure.profile import FILE, ProfileRecorder

STEP = [sys.executable, "-m", "benchmarks.step_time"]
LATENCY_S = 1e-4  # of test hosts
# Steps by rate, so that no run takes more than some minutes.
STEPS = {"10mbit": 2, "100mbit": 4, "1gbit": 10, "10gbit": 12}


def profile(model: str, folder: str, seconds: float) -> None:
    """Measure one rank on this core; run in a process of its own."""
    from benchmarks.step_time import bare_trainer, quiet

    torch.set_num_threads(1)
    with quiet():
        module = job(model)
        recorder = ProfileRecorder(seconds, folder)
        # By the strategy: its hooks and its Trainer are part of a step.
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29530"
        )
        bare_trainer("lean", 1, recorder).fit(module, module.loader(100_000))


def profiles(models: list[str], seconds: float) -> dict[str, RunProfile]:
    found = {}
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                "taskset",
                "-c",
                "0",
                sys.executable,
                "-m",
                "benchmarks.plan",
                "--profile",
                model,
            ]
            subprocess.run([*command, folder, "--seconds", str(seconds)], check=True)
            found[model] = RunProfile.load(Path(folder) / FILE)
    return found


def measured(models: list[str], rate: str, ranks: int, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of ``lean_ddp``, by model."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.jsonl"
        options = ["--models", *models, "--contenders", "lean", "--steps", str(steps)]
        options += ["--rounds", str(rounds), "--out", out]
        if rate == "loopback":
            command = [*STEP, "--pin", "--ranks", str(ranks), *options]
        else:
            command = ["bash", "benchmarks/hosts.sh", rate, str(ranks), *STEP, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = map(json.loads, Path(out).read_text().splitlines())
        return {row["model"]: row["ms"] for row in rows}


def fabric(one: RunProfile, rate: str, ranks: int) -> Fabric:
    """The link of test hosts, or this machine's memory."""
    if rate == "loopback":
        assert one.shared is not None
        bandwidth, latency_s = one.shared
        return Fabric(
            1.0, 0.0, ranks, bandwidth, latency_s, inner_busy=1.0, message_s=HOST_S_PER_BUCKET
        )
    number = float(rate.replace("mbit", "e6").replace("gbit", "e9"))
    return Fabric(
        number / 8, LATENCY_S, cpu_s_per_byte=one.cpu_s_per_byte, message_s=HOST_S_PER_BUCKET
    )


def shared_core(one: RunProfile, ranks: int) -> RunProfile:
    """Several ranks to a core take turns: so many times everything."""
    turns = max(1.0, ranks / (os.cpu_count() or 1))
    return replace(
        one,
        forward_s=one.forward_s * turns,
        backward_s=one.backward_s * turns,
        optimizer_s=one.optimizer_s * turns,
        gradients=tuple((seconds * turns, nbytes) for seconds, nbytes in one.gradients),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["transformer", "mlp", "gpt"])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", "loopback"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 3])
    parser.add_argument(
        "--loopback", nargs="+", type=int, default=[2, 4], help="ranks of one machine"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each profile")
    parser.add_argument("--steps", type=int, help="of each fit; by default by rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="append results to this file, a JSON object a line"
    )
    parser.add_argument("--profile", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile:
        profile(*args.profile, args.seconds)
        return
    ones = profiles(args.models, args.seconds)
    errors = []
    print(
        f"{'model':<13}{'link':<10}{'ranks':>6}{'measured':>10}{'predicted':>11}{'interval':>20}{'error':>8}"
    )
    for rate in args.rates:
        for ranks in args.loopback if rate == "loopback" else args.hosts:
            steps = args.steps or STEPS.get(rate, 12)
            for model, ms in measured(args.models, rate, ranks, steps, args.rounds).items():
                one = shared_core(ones[model], ranks)
                row = forecast(one, fabric(one, rate, ranks), Job(), ranks)
                error = row.step_s * 1e3 / ms - 1
                errors.append(abs(error))
                interval = f"{row.low_s * 1e3:.1f} to {row.high_s * 1e3:.1f}"
                print(
                    f"{model:<13}{rate:<10}{ranks:>6}{ms:>10.1f}{row.step_s * 1e3:>11.1f}{interval:>20}"
                    f"{error:>+8.1%}",
                    flush=True,
                )
                if args.out:
                    values = {"model": model, "link": rate, "ranks": ranks, "ms": ms}
                    values |= {"predicted_ms": row.step_s * 1e3, "low_ms": row.low_s * 1e3}
                    with args.out.open("a") as file:
                        file.write(json.dumps({**values, "high_ms": row.high_s * 1e3}) + "\n")
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
