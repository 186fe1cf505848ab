"""All measurements, printed and kept: ``make bench`` or ``python -m benchmarks [section ...]``.

Sections: loopback, accumulate, link (1 Gbit/s between two test hosts; needs root and iproute2), rates
(10 Mbit/s to 10 Gbit/s, with a plot), wires and wire_rates (the same with gradients in bf16 and int8
and with torch's hooks), timeline (a picture of one step at 1 Gbit/s), scaling, memory, sampler, outer
(few meetings: accuracy, and a step at 1 Gbit/s beside one without synchronisation). What the machine was
and what was printed goes into ``benchmarks/results/``, also where we are slower.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch

HOSTS = ["bash", "benchmarks/hosts.sh"]
STEP = [sys.executable, "-m", "benchmarks.step_time"]
TUNED = ["ddp:bucket_cap_mb=1", "ddp:bucket_cap_mb=2", "ddp:bucket_cap_mb=4"]
# Optimizer steps by model and rate: 3 MiB of gradients still finish at 10 Mbit/s, 24 MiB would not.
RATES = {
    "gpt": {"10mbit": "2", "100mbit": "6", "1gbit": "12", "10gbit": "12"},
    "transformer": {"100mbit": "3", "300mbit": "6", "1gbit": "10", "3gbit": "10", "10gbit": "10"},
}
WINDOWS = ["--accumulate", "4", "--steps", "6"]
# Stand for files beside the printed table: results by line, and a picture.
DATA, PICTURE = "{data}", "{picture}"
OUT = ["--out", DATA]
FLAGS = ["ddp:gradient_as_bucket_view=true", "ddp:static_graph=true"]
WIRES = ['lean:wire="bf16"', 'lean:wire="int8"']
HOOKS = ["hook:fp16", "hook:powerSGD"]  # torch's bf16 hook refuses gloo
OVER_GLOO = "lean:shared_memory=false"  # as between machines
ROUNDS = ["--mean", "--warm-up", "60", "--steps", "100", "--rounds", "3"]
MEETINGS = [  # braces are doubled: files are filled in
    'lean:outer={{"every":50}}',
    'lean:outer={{"every":50,"fragments":3,"delay":5}}',
]

WIRES_OVER_GLOO = [f"{wire},shared_memory=false" for wire in WIRES]


def contenders(*names: str) -> list[str]:
    return ["--contenders", "ddp", *names, "lean", "alone"]


def link(rate: str, *args: str) -> list[str]:
    return [*HOSTS, rate, "2", *STEP, *args]


SECTIONS: dict[str, list[list[str]]] = {
    "loopback": [[*STEP, "--pin", *contenders(*FLAGS, OVER_GLOO)]],
    "accumulate": [
        [*STEP, "--pin", *WINDOWS, "--models", "mlp", "transformer", *contenders()],
        link("1gbit", *WINDOWS, "--models", "mlp", "transformer", *contenders()),
    ],
    "link": [
        link("1gbit", "--models", "transformer", *contenders(*TUNED)),
        link("1gbit", "--models", "mlp", *contenders(TUNED[0])),
    ],
    "rates": [
        *(
            link(rate, "--models", model, *OUT, "--steps", steps, "--contenders", "ddp", "lean")
            for model, runs in RATES.items()
            for rate, steps in runs.items()
        ),
        [sys.executable, "-m", "benchmarks.rates_plot", DATA, PICTURE],
    ],
    "wires": [
        link("1gbit", "--models", "mlp", "transformer", *contenders(*HOOKS, *WIRES)),
        [*STEP, "--pin", "--models", "mlp", *contenders(*WIRES_OVER_GLOO, OVER_GLOO)],
    ],
    "wire_rates": [
        *(
            link(rate, "--models", model, *OUT, "--steps", steps, *contenders(*WIRES, *HOOKS[:1]))
            for model, runs in RATES.items()
            for rate, steps in runs.items()
        ),
        [sys.executable, "-m", "benchmarks.rates_plot", DATA, PICTURE],
    ],
    "timeline": [
        [*HOSTS, "1gbit", "2", sys.executable, "-m", "benchmarks.timeline", PICTURE],
    ],
    "scaling": [[sys.executable, "-m", "benchmarks.scaling"]],
    "memory": [[sys.executable, "-m", "benchmarks.memory"]],
    "sampler": [[sys.executable, "-m", "benchmarks.sampler"]],
    "plan": [[sys.executable, "-m", "benchmarks.plan", *OUT]],
    "large_batch": [[sys.executable, "-m", "benchmarks.large_batch", *OUT]],
    "outer": [
        [sys.executable, "-m", "benchmarks.outer"],
        link("1gbit", "--models", "mlp", *ROUNDS, "--contenders", "alone", *MEETINGS, "lean"),
    ],
}


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {model}, {os.cpu_count()} cores, load {load:.1f} before,"
        f" Python {platform.python_version()}, torch {torch.__version__}, lightning {pl.__version__}"
    )


def main() -> None:
    names = sys.argv[1:] or list(SECTIONS)
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"no section {unknown}; there are {', '.join(SECTIONS)}")
    folder = Path("benchmarks/results")
    folder.mkdir(exist_ok=True)
    can_have_hosts = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    for name in names:
        path = folder / f"{time.strftime('%Y-%m-%d')}-{name}.txt"
        with path.open("w") as kept:

            def say(text: str, kept=kept) -> None:
                print(text, end="", flush=True)
                kept.write(text)

            say(f"# {name}: {machine()}\n")
            path.with_suffix(".jsonl").unlink(missing_ok=True)
            for template in SECTIONS[name]:
                files = {"data": path.with_suffix(".jsonl"), "picture": path.with_suffix(".png")}
                command = [part.format(**files) for part in template]
                if command[: len(HOSTS)] == HOSTS and not can_have_hosts:
                    say(f"not run: {' '.join(command)} (needs root and iproute2)\n")
                    continue
                if "benchmarks.rates_plot" in command and not files["data"].exists():
                    continue
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                for line in process.stdout or ():
                    say(line)
                if process.wait():
                    say(f"failed: {' '.join(command)}\n")


if __name__ == "__main__":
    main()
