"""All measurements, printed and kept: ``make bench`` or ``python -m benchmarks [section ...]``.

Sections: loopback, accumulate, link (1 Gbit/s between two test hosts; needs root and iproute2), rates
(10 Mbit/s to 10 Gbit/s), scaling, memory, sampler. What the machine was and what was printed goes into
``benchmarks/results/``, also where we are slower.
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
FLAGS = ["ddp:gradient_as_bucket_view=true", "ddp:static_graph=true"]


def contenders(*names: str) -> list[str]:
    return ["--contenders", "ddp", *names, "lean", "alone"]


def link(rate: str, *args: str) -> list[str]:
    return [*HOSTS, rate, "2", *STEP, *args]


SECTIONS: dict[str, list[list[str]]] = {
    "loopback": [[*STEP, "--pin", *contenders(*FLAGS)]],
    "accumulate": [
        [*STEP, "--pin", "--accumulate", "4", "--models", "mlp", "transformer", *contenders()]
    ],
    "link": [link("1gbit", "--models", "transformer", "mlp", *contenders(*TUNED))],
    "rates": [
        link(rate, "--models", "transformer", "--rounds", "3", "--steps", steps, *contenders())
        for rate, steps in (("10mbit", "2"), ("100mbit", "4"), ("1gbit", "8"), ("10gbit", "8"))
    ],
    "scaling": [[sys.executable, "-m", "benchmarks.scaling"]],
    "memory": [[sys.executable, "-m", "benchmarks.memory"]],
    "sampler": [[sys.executable, "-m", "benchmarks.sampler"]],
}
NEED_HOSTS = {"link", "rates"}


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
            if name in NEED_HOSTS and not can_have_hosts:
                say("not run: needs root and iproute2\n")
                continue
            for command in SECTIONS[name]:
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                for line in process.stdout or ():
                    say(line)
                if process.wait():
                    say(f"failed: {' '.join(command)}\n")


if __name__ == "__main__":
    main()
