"""Draw step time against the rate of the link, from what ``step_time.py --out`` wrote.

python -m benchmarks.rates_plot results.jsonl picture.png
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

UNITS = {"mbit": 1e6, "gbit": 1e9}
COLORS = {
    "ddp": "#4a78a8",
    "hook:fp16": "#8a8a8a",
    "lean": "#d1495b",
    'lean:wire="bf16"': "#edae49",
    'lean:wire="int8"': "#3a7d44",
}
NAMES = {
    "hook:fp16": "ddp, fp16 hook",
    "lean": "lean_ddp",
    'lean:wire="bf16"': "lean_ddp, wire=bf16",
    'lean:wire="int8"': "lean_ddp, wire=int8",
}


def bits_per_s(rate: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", rate).groups()
    return float(number) * UNITS[unit]


def main() -> None:
    from matplotlib.figure import Figure

    source, target = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, len(models), sharex="col", squeeze=False)
    for column, model in enumerate(models):
        above, below = axes[0][column], axes[1][column]
        for contender, color in COLORS.items():
            mine = [r for r in rows if r["model"] == model and r["contender"] == contender]
            if not mine:
                continue
            mine.sort(key=lambda row: bits_per_s(row["link"]))
            x = [bits_per_s(row["link"]) for row in mine]
            name = NAMES.get(contender, contender)
            above.plot(x, [row["ms"] for row in mine], "o-", color=color, label=name)
            if contender == "ddp":
                continue
            middle = [row["ratio"] for row in mine]
            low, high = zip(*(map(float, row["spread"].split("..")) for row in mine), strict=True)
            below.fill_between(x, low, high, color=color, alpha=0.2)  # the spread of the rounds
            below.plot(x, middle, "o-", color=color, label=f"{name} / ddp, median")
        above.set(xscale="log", yscale="log", title=model, ylabel="ms a step")
        below.axhline(1, color="grey", linewidth=0.8)
        below.set(ylim=(0, 1.2), xlabel="limit of the link, bit/s", ylabel="ratio of step times")
        above.legend()
        below.legend(loc="lower left")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
