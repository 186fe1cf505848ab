"""What ``lean-ddp plan`` predicts beside what is measured: other rates, more hosts, one machine.

    python -m benchmarks.plan                     # all of it: needs root and iproute2, and a quiet machine
    python -m benchmarks.plan --rates 1gbit --hosts 2 --models gpt --steps 4 --rounds 1

The profile is one rank's that talks to none, measured just before (the machine's clock drifts) and on a
machine as busy as in the run; nothing of the measured runs goes into a prediction. Writes a table, and with
``--out`` a JSON object a line.
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


def profile(model: str, folder: str, rank: str, seconds: float) -> None:
    """Measure one rank on this core; run in a process of its own."""
    from benchmarks.step_time import bare_trainer, quiet

    torch.set_num_threads(1)
    with quiet():
        module = job(model)
        recorder = ProfileRecorder(seconds, folder)
        # By the strategy: its hooks and its Trainer are part of a step.
        port = str(29530 + int(rank))
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        bare_trainer("lean", 1, recorder).fit(module, module.loader(100_000))


def profiles(models: list[str], seconds: float, ranks: int = 1) -> dict[str, RunProfile]:
    """One rank's profile by model, while ``ranks - 1`` others, that it does not talk to, do the same.

    Test hosts share a machine: its memory, its clock, and where there are more of them than cores, those.
    The slowest of them is who a step waits for.
    """
    cores = os.cpu_count() or 1
    found = {}
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            started = []
            for rank in range(ranks):
                command = [
                    "taskset",
                    "-c",
                    str(rank % cores),
                    sys.executable,
                    "-m",
                    "benchmarks.plan",
                ]
                command += ["--profile", model, f"{folder}/{rank}", str(rank)]
                started.append(subprocess.Popen([*command, "--seconds", str(seconds)]))
            codes = [process.wait() for process in started]
            if any(codes):
                raise SystemExit(f"no profile of {model}")
            ones = [RunProfile.load(Path(folder, str(rank), FILE)) for rank in range(ranks)]
            found[model] = max(ones, key=lambda one: one.forward_s + one.backward_s)
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


def in_company(alone: RunProfile, busy: RunProfile, ranks: int) -> RunProfile:
    """How fast a rank computes beside the others; what sending costs was measured without them."""
    turns = -(-ranks // (os.cpu_count() or 1))
    return replace(
        busy,
        cpu_s_per_byte=alone.cpu_s_per_byte * turns,
        shared=alone.shared,
        loopback=alone.loopback,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["transformer", "mlp", "gpt"])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", "loopback"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 3])
    parser.add_argument(
        "--loopback", nargs="+", type=int, default=[2, 4], help="ranks of one machine"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each profile")
    parser.add_argument("--steps", type=int, help="of each fit; by default by rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="append results to this file, a JSON object a line"
    )
    parser.add_argument(
        "--profile", nargs=3, metavar=("MODEL", "FOLDER", "RANK"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.profile:
        profile(*args.profile, args.seconds)
        return
    alone = profiles(args.models, args.seconds)
    errors = []
    print(
        f"{'model':<13}{'link':<10}{'ranks':>6}{'measured':>10}{'predicted':>11}{'interval':>20}{'error':>8}"
    )
    for rate in args.rates:
        for ranks in args.loopback if rate == "loopback" else args.hosts:
            steps = args.steps or STEPS.get(rate, 12)
            busy = profiles(args.models, args.seconds, ranks)
            for model, ms in measured(args.models, rate, ranks, steps, args.rounds).items():
                one = in_company(alone[model], busy[model], ranks)
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
