"""``lean-ddp plan``: what a run would cost on more ranks and another link.

``lean-ddp plan measure experiment=bytes`` measures one rank of this machine; ``lean-ddp plan FILE`` reads
what it wrote. Without a file, numbers are typed.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dp.app.parsing import add_options, positive

if TYPE_CHECKING:
    from lightning_dp.engine.plan.cost import Fabric
    from lightning_dp.measure.forecast import Forecast, Job, RunProfile

MOST_RANKS = 2**20
LEAST, MOST = 1e-18, 1e18  # of what is typed, in its own unit: beyond, sums overflow
GBIT = 1e9 / 8
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_RATES = {
    "bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": GBIT, "tbit": 1e12 / 8,
    "kB": 1e3, "mB": 1e6, "gB": 1e9, "tB": 1e12, "kiB": 2.0**10, "miB": 2.0**20, "giB": 2.0**30,
}  # fmt: skip
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
NEEDED = ("parameters", "forward", "backward")  # in place of a file
TYPED = (*NEEDED, "optimizer", "samples", "state", "activations")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "B": 1e9}


def _quantity(units: dict[str, float], what: str, *, zero: bool = False) -> Callable[[str], float]:
    """A parser of a number with a unit.

    Args:
        units: What each unit is worth.
        what: For the message.
        zero: Whether it may be 0.
    """

    def read(text: str) -> float:
        match = re.fullmatch(_NUMBER + r"\s*([a-z]*)(?:/s)?", text.strip(), re.IGNORECASE)
        unit = _unit(match[2]) if match else ""
        value = float(match[1]) * units[unit] if match and unit in units else -1.0
        if value < 0 or (value == 0 and not zero):
            least = "0 or more" if zero else "above 0"
            raise argparse.ArgumentTypeError(f"must be {what}, {least}, not {text!r}")
        if value and not LEAST <= value <= MOST:
            raise argparse.ArgumentTypeError(f"nothing is {text!r}: it must be {what}")
        return value

    return read


def _unit(text: str) -> str:
    """In lower case, but for the B of bytes: a small b might mean bits, so that ``Gb`` is no unit."""
    return text[:-1].lower() + "B" if text.endswith("B") else text.lower()


_BYTES = _quantity({"": 1.0}, "a number of bytes", zero=True)


def ranks_of(text: str) -> list[int]:
    """Read ``8``, ``2,4,8`` or ``1..4096``, which means the powers of two between, and both ends."""
    try:
        first, dots, last = text.partition("..")
        if dots:
            low, high = int(first), int(last)
            powers = [2**i for i in range(MOST_RANKS.bit_length()) if low < 2**i < high]
            found = [low] if low == high else [low, *powers, high]
        else:
            found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or sorted(set(found)) != found or not 1 <= found[0] <= found[-1] <= MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"must be numbers of ranks in rising order, as 8 or 2,4,8 or 1..4096, not {text!r}"
        )
    return found


def _measured(text: str) -> tuple[int, float]:
    ranks, _, seconds = text.partition("=")
    return positive(ranks), _quantity({**_TIMES, "": 1.0}, "RANKS=TIME as 8=120ms")(seconds)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(
        prog="lean-ddp plan", usage="lean-ddp plan [FILE] [OPTIONS]", description=__doc__
    )
    made.add_argument("file", nargs="?", type=Path, help="profile.json of lean-ddp plan measure")
    add_options(
        made,
        ("--ranks", ranks_of, ranks_of("1..64"), "8, or 2,4,8, or 1..4096", "1..64"),
        ("--out", Path, Path("plan.png"), "the picture, or a folder for it"),
    )
    made.add_argument(
        "--measured", type=_measured, nargs="+", default=[], metavar="RANKS=TIME",
        help="step times of your own cluster, as 8=120ms 64=131ms: the line through them (default: none)",
    )  # fmt: skip
    _add_link(made)
    _add_job(made)
    _add_typed(made)
    return made


def _add_link(made: argparse.ArgumentParser) -> None:
    """What joins ranks."""
    rate = _quantity(_RATES, "a rate as 25Gbit or 3GB")
    wait = _quantity(_TIMES, "a time as 30us", zero=True)
    link = made.add_argument_group("the link")
    add_options(
        link,
        ("--bandwidth", rate, None, "of a host's link, 25Gbit", "this machine's own, as measured"),
        ("--latency", wait, 30e-6, "of a message between hosts", "30us"),
        ("--inner-bandwidth", rate, None, "between ranks of a host", "as measured, or 100GB"),
        ("--ranks-per-host", positive, 1, "ranks that share a host's link"),
    )


def _add_job(made: argparse.ArgumentParser) -> None:
    """How gradients are averaged."""
    whole = _quantity({"": 1.0}, "a number of steps", zero=True)
    job = made.add_argument_group("the run")
    add_options(
        job,
        ("--wire", ("fp32", "bf16", "fp16", "int8"), "fp32", "as the option"),
        ("--zero", (0, 1), 0, "1 shards the optimizer"),
        ("--gather", ("step", "forward"), "step", "what the parameters of --zero 1 come back in"),
        ("--accumulate", positive, 1, "micro-batches of an optimizer step"),
        ("--outer", positive, 1, "steps between two averages of parameters"),
        ("--fragments", positive, 1, "parts of the model that travel in turns, with --outer"),
        ("--delay", whole, 0, "steps that hide a part's way, with --outer"),
        ("--batch", positive, None, "samples of a step over all ranks", "grows with ranks"),
        ("--bucket-mb", _quantity({"": 1.0}, "MiB"), None, "size of buckets", "the best"),
    )


def _add_typed(made: argparse.ArgumentParser) -> None:
    """What stands in place of a file."""
    typed = made.add_argument_group("in place of a file")
    wait = _quantity(_TIMES, "a time as 30us", zero=True)
    count, time = _quantity(_COUNTS, "a number as 124M"), _quantity(_TIMES, "a time as 80ms")
    size = _quantity({**_RATES, "": 1.0}, "bytes as 2GB")
    add_options(
        typed,
        ("--parameters", count, None, "trainable numbers, 124M", "none"),
        ("--forward", time, None, "of a micro-batch, 40ms", "none"),
        ("--backward", time, None, "of a micro-batch, 80ms", "none"),
        ("--optimizer", wait, None, "a step of it, 5ms", "0"),
        ("--samples", positive, None, "in a micro-batch of a rank", "1"),
        ("--state", _BYTES, None, "bytes of optimizer state a number", "8, AdamW"),
        ("--activations", size, None, "of a micro-batch", "0"),
    )


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    if argv and argv[0] == "measure":
        return _measure(argv[1:])
    command = parser()
    args = command.parse_args(argv)
    from lightning_dp.errors import ConfigError

    try:
        if args.measured:
            unused = [
                name for name, value in vars(args).items() if value != command.get_default(name)
            ]
            return _draw_out(args, [name for name in unused if name not in ("measured", "ranks")])
        job = _job(args)
        profile = _profile(args)
        fabric = _fabric(profile, args)
    except (ConfigError, ValueError) as error:
        command.error(str(error))
    return _report(profile, fabric, job, args)


def _measure(overrides: Sequence[str]) -> int:
    """Train for some seconds on one rank with ``debug=profile``."""
    if any(each in ("-h", "--help") for each in overrides):
        print(
            "usage: lean-ddp plan measure [OVERRIDES OF lean-ddp train], for example experiment=bytes"
        )
        return 0
    from lightning_dp.app.cli import run_as_module

    run_as_module("lightning_dp.app.train", [*overrides, "debug=profile"])
    return 0


def _job(args: argparse.Namespace) -> Job:
    """What is asked for, where it can be had."""
    from lightning_dp.measure.forecast import Job

    if args.zero and args.outer > 1:
        raise ValueError("--zero 1 and --outer exclude each other: drop one of them")
    if args.gather != "step" and not args.zero:
        raise ValueError(f"--gather {args.gather} needs --zero 1")
    if args.delay > args.outer // args.fragments or args.fragments > args.outer:
        least = args.fragments * max(1, math.ceil(args.delay))
        raise ValueError(
            f"--fragments {args.fragments} and --delay {args.delay:g} need --outer of at least {least}:"
            " each part arrives before the next one leaves"
        )
    return Job(
        wire=args.wire,
        accumulate=args.accumulate,
        zero=args.zero,
        gather=args.gather,
        outer=args.outer,
        fragments=args.fragments,
        delay=int(args.delay),
        batch=args.batch,
        bucket_mib=args.bucket_mb,
    )


def _profile(args: argparse.Namespace) -> RunProfile:
    """From the file, or from what was typed.

    Raises:
        ValueError: Neither is there, or both.
    """
    from lightning_dp.measure.forecast import RunProfile

    if args.file is not None:
        if typed := [f"--{name}" for name in TYPED if getattr(args, name) is not None]:
            raise ValueError(f"{args.file} says what a rank does; leave {', '.join(typed)} out")
        return RunProfile.load(args.file)
    if missing := [f"--{name}" for name in NEEDED if getattr(args, name) is None]:
        raise ValueError(
            f"give a profile.json (lean-ddp plan measure makes one), or type {', '.join(missing)}"
        )
    slots = 64
    each = math.ceil(4 * args.parameters / slots)
    return RunProfile(
        name=f"{args.parameters / 1e6:g} M parameters", samples=args.samples or 1, forward_s=args.forward,
        backward_s=args.backward, optimizer_s=args.optimizer or 0.0,
        gradients=tuple((args.backward * (i + 1) / slots, each) for i in range(slots)),
        parameter_bytes=round(4 * args.parameters),
        optimizer_bytes=round((8 if args.state is None else args.state) * args.parameters),
        activation_bytes=round(args.activations or 0),
    )  # fmt: skip


def _fabric(profile: RunProfile, args: argparse.Namespace) -> Fabric:
    """The link that was described; without one, this machine's own.

    Raises:
        ValueError: Nothing is known of a link.
    """
    from lightning_dp.engine.plan.cost import HOST_S_PER_BUCKET, Fabric

    on_cpu = profile.cpu_s_per_byte > 0
    known = profile.shared or profile.loopback
    inner = args.inner_bandwidth or (known[0] if known else 100e9)
    fabric = Fabric(
        bandwidth=args.bandwidth or math.inf,
        latency_s=args.latency,
        ranks_per_host=args.ranks_per_host,
        inner_bandwidth=inner,
        inner_latency_s=known[1] if known else 5e-6,
        inner_busy=1.0 if profile.shared and args.inner_bandwidth is None else 0.0,
        cpu_s_per_byte=profile.cpu_s_per_byte,
        message_s=HOST_S_PER_BUCKET if on_cpu else 4e-5,
    )
    if args.bandwidth is not None:
        return fabric
    if known is None:
        raise ValueError("give --bandwidth: no link was measured")
    return replace(fabric, ranks_per_host=args.ranks[-1])


# What is printed


def _report(profile: RunProfile, fabric: Fabric, job: Job, args: argparse.Namespace) -> int:
    from lightning_dp.measure.forecast import forecast

    found = [forecast(profile, fabric, job, ranks) for ranks in args.ranks]
    rows = [row for row in found if row is not None]
    if not rows:
        print(
            f"a batch of {job.batch} has less than one sample for each of {args.ranks[0]} rank(s)"
        )
        return 2
    _table(profile, rows)
    for line in advice(profile, fabric, job, rows):
        print(line)
    if len(rows) < len(found):
        print(
            f"From {args.ranks[len(rows)]} ranks on, a batch of {job.batch} is less than a sample each."
        )
    path = args.out / "plan.png" if args.out.is_dir() else args.out
    path = path if path.suffix else path.with_suffix(".png")
    try:
        draw(rows, profile.name, path)
    except (OSError, ValueError) as error:
        print(f"lean-ddp plan: error: --out {path}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}")
    return 0


def _table(profile: RunProfile, rows: Sequence[Forecast]) -> None:
    from rich.table import Table

    from lightning_dp.app.report import show

    table = Table(title=f"{profile.name}: predicted, with an interval", title_justify="left")
    for name in ("ranks", "step ms", "from", "to", "waiting ms", "hidden", "efficiency", "samples/s",
                 "sent MB",
        "memory GB", "bucket MiB"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.ranks), f"{row.step_s * 1e3:.4g}", f"{row.low_s * 1e3:.4g}", f"{row.high_s * 1e3:.4g}",
            f"{row.exposed_s * 1e3:.3g}", f"{row.hidden:.0%}", f"{row.efficiency:.0%}",
            f"{row.samples_per_s:.4g}", f"{row.sent_bytes / 1e6:.4g}",
            f"{row.memory_bytes / 1e9:.3g}",
            f"{row.bucket_mib:g}" if row.bucket_mib else "-",
        )  # fmt: skip
    show(table)


def advice(profile: RunProfile, fabric: Fabric, job: Job, rows: Sequence[Forecast]) -> list[str]:
    """Say where more ranks stop paying, what to change first, and what cannot help."""
    from lightning_dp.measure.forecast import measures, stops_paying, zero_helps_memory

    stop = stops_paying(rows)
    said = [
        f"From {stop} rank(s) on, twice as many bring less than 1.5 times the samples a second."
        if stop is not None
        else f"More ranks pay up to {rows[-1].ranks}."
    ]
    last = next((row.ranks for row in rows if stop and row.ranks > stop), rows[-1].ranks)
    if last == 1:
        return said
    found = measures(profile, fabric, job, last)
    helps = [f"{name} (x {gain:.2f})" for name, gain in found if gain >= 1.02]
    useless = [name for name, gain in found if gain < 1.02]
    said.append(
        f"On {last} ranks, change first: {', then '.join(helps)}."
        if helps
        else f"On {last} ranks nothing here makes a step faster."
    )
    if useless:
        said.append(f"Cannot help there: {', '.join(useless)}.")
    if not zero_helps_memory(profile):
        said.append("zero=1 cannot save memory: the optimizer keeps next to no state.")
    if rows[-1].ranks > 64:
        said.append(
            "Beyond some hundred ranks systems break in ways that no model knows: one published run took"
            " 13 % longer at 256 than the line through its smaller ones. Measure at a quarter of your"
            " target and give --measured."
        )
    return said


def _draw_out(args: argparse.Namespace, unused: Sequence[str]) -> int:
    """Draw out the line through step times that were measured on a cluster.

    Raises:
        ValueError: It is one point, it falls, or ``unused`` names what has no effect on it.
    """
    from lightning_dp.app.report import print_table
    from lightning_dp.engine.plan.cost import Line

    if unused:
        names = ", ".join("FILE" if n == "file" else f"--{n.replace('_', '-')}" for n in unused)
        raise ValueError(f"--measured is the line through step times alone; leave {names} out")
    points = sorted(args.measured)
    if len({ranks for ranks, _ in points}) < 2:
        raise ValueError("--measured needs step times at two numbers of ranks, as 8=120ms 64=131ms")
    line = Line.through(points)
    if line.slope < 0:
        if line.at(points[-1][0])[0] < (1 - 2 * Line.LEAST_ERROR) * line.at(points[0][0])[0]:
            raise ValueError(
                "--measured: steps get faster with more ranks. The line is that of ranks with the same"
                " micro-batch each; a batch that is divided among them has none"
            )
        line = replace(line, start=line.at(points[0][0])[0], slope=0.0)  # within what points err
    most = points[-1][0]
    rows = {}
    for ranks in args.ranks:
        step_s, low_s, high_s = line.at(ranks)
        beyond = ", more than four times what was measured" if ranks > 4 * most else ""
        rows[f"{ranks} ranks"] = (
            f"{step_s * 1e3:.4g} ms ({low_s * 1e3:.4g} to {high_s * 1e3:.4g}){beyond}"
        )
    print_table(f"a step: {line.start * 1e3:.4g} ms + {line.slope * 1e6:.4g} us a rank", rows)
    return 0


def draw(rows: Sequence[Forecast], name: str, path: Path) -> None:
    """Draw step time with its interval, hidden share, efficiency and memory over ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    ranks = [row.ranks for row in rows]
    axes = figure.subplots(2, 2).flatten()
    axes[0].fill_between(
        ranks, [1e3 * row.low_s for row in rows], [1e3 * row.high_s for row in rows], alpha=0.25
    )
    for axis, title, values in zip(
        axes,
        ("step, ms", "communication hidden, %", "efficiency, %", "memory of a rank, GB"),
        (
            [1e3 * row.step_s for row in rows],
            [100 * row.hidden for row in rows],
            [100 * row.efficiency for row in rows],
            [row.memory_bytes / 1e9 for row in rows],
        ),
        strict=True,
    ):
        axis.plot(ranks, values, marker=".")
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, None)
        axis.set_title(title)
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{name}: predicted")
    figure.savefig(path, dpi=110)
