"""``lean-ddp data``: draw which rank gets which sample, over an epoch with a resume in it.

The picture is made by the objects that training uses, so it shows what they do, not what they should.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_dp.app.parsing import add_options, positive

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lightning_dp.data.share import Cursor
    from lightning_dp.data.train_batches import TrainBatches

COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2", "#E45756", "#72B7B2", "#EECA3B", "#9D755D")
GREY = "#DDDDDD"
GAP = 0.6
AGAIN = "hatched: a sample that comes again, to fill up the last step"
MOST_SAMPLES = 300


class Stage(NamedTuple):
    """What the ranks do in one part of the picture.

    Attributes:
        title: Its heading.
        batches: For each rank its batches, each a list of sample numbers.
        first: The number of the first batch.
        seen: Samples of the epoch that came before this part.
    """

    title: str
    batches: list[list[list[int]]]
    first: int = 0
    seen: frozenset[int] = frozenset()

    def counts(self) -> Counter[int]:
        """How often each sample comes."""
        return Counter(i for own in self.batches for batch in own for i in batch)


def _loader(args: argparse.Namespace) -> DataLoader[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(
        range(args.samples),  # type: ignore[arg-type]
        batch_size=args.batch,
        shuffle=not args.in_order,
        drop_last=args.drop_last,
    )


def plan(args: argparse.Namespace) -> list[Stage]:
    """Deal an epoch: until the stop, after the resume, and an evaluation of the same data.

    Raises:
        ValueError: The stop lies behind the end of the epoch.
    """
    from lightning_dp.data.loader import LoaderParts, Shard
    from lightning_dp.data.share import Cursor
    from lightning_dp.data.train_batches import TrainBatches

    parts = LoaderParts.of(_loader(args))

    def train(world_size: int, start: Cursor) -> list[TrainBatches]:
        shards = [Shard(rank, world_size, args.seed) for rank in range(world_size)]
        return [TrainBatches(parts, shard, start) for shard in shards]

    before = train(args.ranks, Cursor(args.epoch))
    if not 0 <= args.stop_after <= len(before[0]):
        raise ValueError(f"--stop-after must be from 0 to {len(before[0])}, the batches of a rank")
    over = args.stop_after == len(before[0])
    after = train(args.then_ranks, before[0].cursor_after(args.epoch, args.stop_after))
    rest = "nothing is left of the epoch" if over else "the rest of the same order"
    then = f"{args.then_ranks} rank(s)"
    first = Stage(
        f"epoch {args.epoch} on {args.ranks} rank(s), stopped after {args.stop_after} step(s)",
        [list(each.local_batches(args.stop_after)) for each in before],
    )
    return [
        first,
        Stage(
            f"resumed on {then}: {rest}",
            [[] if over else list(each) for each in after],
            after[0].first_batch,
            frozenset(first.counts()),
        ),
        Stage(f"evaluation on {then}: each sample once, equal steps", _evaluation(args)),
    ]


def _evaluation(args: argparse.Namespace) -> list[list[list[int]]]:
    from torch.utils.data import DataLoader

    from lightning_dp.data.eval_batches import EvalBatches
    from lightning_dp.data.loader import LoaderParts, Shard

    plain: DataLoader[Any] = DataLoader(range(args.samples), batch_size=args.batch)  # type: ignore[arg-type]
    shards = [Shard(rank, args.then_ranks, args.seed) for rank in range(args.then_ranks)]
    return [list(EvalBatches(LoaderParts.of(plain), shard)) for shard in shards]


def draw(stages: Sequence[Stage], samples: int, path: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    widest = max(samples, *(_width(stage) for stage in stages))
    heights = [len(stage.batches) + 1.2 for stage in stages] + [2.6]
    size = (max(6.0, 0.34 * widest + 1.2), 0.36 * sum(heights) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights})
    for axis, stage in zip(axes, stages, strict=False):
        _draw_stage(axis, stage)
    _draw_counts(axes[-1], stages[:2], samples)
    for axis in axes:
        axis.set_xlim(-0.6, widest)
    if any(repeated(stage) for stage in stages):
        patch = Patch(facecolor="white", edgecolor="black", hatch="////", linewidth=0)
        figure.legend([patch], [AGAIN], loc="outside lower left", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def repeated(stage: Stage) -> list[int]:
    """The samples of a stage that came before, in it or in an earlier part of the epoch."""
    return sorted(i for i, times in stage.counts().items() if times > 1 or i in stage.seen)


def _width(stage: Stage) -> float:
    return sum(max(map(len, step), default=0) + GAP for step in _steps(stage))


def _steps(stage: Stage) -> list[list[list[int]]]:
    longest = max(map(len, stage.batches), default=0)
    return [
        [own[step] if step < len(own) else [] for own in stage.batches] for step in range(longest)
    ]


def _draw_stage(axis: Any, stage: Stage) -> None:
    """One row a rank, one block a step, one square a sample."""
    axis.set_title(stage.title, loc="left", fontsize=10)
    left, seen = 0.0, set(stage.seen)
    for number, step in enumerate(_steps(stage), start=stage.first):
        width = max(map(len, step), default=0)
        axis.text(
            left + (width - 1) / 2, -0.75, f"step {number}", ha="center", va="center", fontsize=7
        )
        for rank, batch in enumerate(step):
            for at, sample in enumerate(batch):
                colour = COLOURS[rank % len(COLOURS)]
                _square(axis, left + at, rank, colour, str(sample), again=sample in seen)
                seen.add(sample)
        left += width + GAP
    ranks = len(stage.batches)
    axis.set_ylim(ranks - 0.4, -1.1)
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    _plain(axis)


def _draw_counts(axis: Any, stages: Sequence[Stage], samples: int) -> None:
    """The data set: who trained each sample, and how often."""
    axis.set_title(
        "the data set: rank that trained each sample (top: before the stop, bottom: after)",
        loc="left",
        fontsize=10,
    )
    for row, stage in enumerate(stages):
        owner = {i: rank for rank, own in enumerate(stage.batches) for batch in own for i in batch}
        counts = stage.counts()
        for sample in range(samples):
            times = counts[sample]
            colour = COLOURS[owner[sample] % len(COLOURS)] if times else GREY
            _square(axis, sample, row, colour, str(sample) if times else "")
            if times > 1:
                axis.text(sample + 0.42, row + 0.42, f"x{times}", ha="center", fontsize=6)
    axis.set_ylim(1.7, -0.7)
    axis.set_yticks([0, 1], ["before", "after"], fontsize=8)
    _plain(axis)


def _square(
    axis: Any, left: float, row: float, colour: str, text: str, *, again: bool = False
) -> None:
    """A sample; hatched where it comes ``again``, to fill up a step."""
    from matplotlib.patches import Rectangle

    face, hatch = ("white", "////") if again else (colour, None)
    corner = left - 0.45, row - 0.4
    style: dict[str, Any] = {"facecolor": face, "edgecolor": colour, "hatch": hatch, "linewidth": 0}
    axis.add_patch(Rectangle(corner, 0.9, 0.8, **style))
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5} if again else None
    axis.text(
        left, row, text, ha="center", va="center", fontsize=7,
        color="black" if again else "white", bbox=box,
    )  # fmt: skip


def _plain(axis: Any) -> None:
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def summary(stages: Sequence[Stage], samples: int) -> str:
    """Say in one line what the picture shows of training."""
    total = stages[0].counts() + stages[1].counts()
    never = sorted(set(range(samples)) - set(total))
    again = sorted(sample for sample, times in total.items() if times > 1)
    text = f"{len(total)} of {samples} samples were trained; "
    text += f"{len(again)} more than once (to fill up the last step): {again}; " if again else ""
    return text + (f"left out by drop_last: {never}" if never else "none was left out")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(
        prog="lean-ddp data",
        description="Draw which rank gets which sample, over an epoch with a resume in it.",
    )
    add_options(
        made,
        ("--samples", positive, 23, f"length of the data set, at most {MOST_SAMPLES}"),
        ("--batch", positive, 2, "batch size of one rank"),
        ("--ranks", positive, 2, "ranks before the stop"),
        ("--then-ranks", positive, 3, "ranks after it"),
        ("--stop-after", int, 2, "steps before the stop"),
        ("--epoch", int, 0, "number of the epoch, which changes its order"),
        ("--seed", int, 0, "seed of the order, as in seed_everything"),
        ("--in-order", bool, False, "a loader with shuffle=False", "shuffled"),
        ("--drop-last", bool, False, "a loader with drop_last=True", "the last step is filled up"),
        ("--out", Path, "data.png", "file of the picture, any type that matplotlib writes"),
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    command = parser()
    args = command.parse_args(argv)
    if args.samples > MOST_SAMPLES:
        command.error(f"nobody can read a picture of more than {MOST_SAMPLES} samples")
    try:
        stages = plan(args)
        draw(stages, args.samples, args.out)
    except (ValueError, OSError) as error:
        command.error(str(error))
    print(summary(stages, args.samples))
    print(f"wrote {args.out}")
    return 0
