"""What a run leaves behind: curves.png from metrics.csv, and a short table on the terminal."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

METRICS_FILE = "metrics.csv"
EARLIER_FILES = "metrics.before_*.csv"
CURVES_FILE = "curves.png"
Points = list[tuple[float, float]]
# One colour a stage, whatever the metric.
_COLOURS = {"train": "tab:blue", "val": "tab:orange", "test": "tab:green"}
_MANY_POINTS = 60  # from here on a line without markers reads better


def keep_earlier_metrics(folder: Path, *, resumes: bool) -> None:
    """Rename the metrics.csv of an earlier attempt, which Lightning's CSVLogger would delete.

    Args:
        folder: A run's folder.
        resumes: Whether this attempt goes on from the earlier one; if not, its metrics are forgotten.
    """
    file = folder / METRICS_FILE
    earlier = list(folder.glob(EARLIER_FILES))
    if not resumes:
        for path in earlier:
            path.unlink()
    elif file.exists():
        file.rename(folder / f"metrics.before_{len(earlier) + 1}.csv")


def read_metrics(folder: Path) -> dict[str, Points]:
    """Read metrics.csv and those of earlier attempts.

    Args:
        folder: A run's folder.

    Returns:
        For each metric its ``(step, value)`` pairs in order of steps; of two at one step the later
        attempt's counts.
    """
    found: dict[str, dict[float, float]] = defaultdict(dict)
    earlier = sorted(folder.glob(EARLIER_FILES), key=lambda path: (len(path.name), path.name))
    for file in [*earlier, folder / METRICS_FILE]:
        if not file.exists():
            continue
        with file.open(newline="") as rows:
            for row in csv.DictReader(rows):
                for name, value in row.items():
                    if name not in ("step", "epoch") and value:
                        found[name][float(row["step"])] = float(value)
    return {name: sorted(points.items()) for name, points in found.items()}


def draw_curves(folder: Path) -> Path | None:
    """Draw every metric against the optimizer step into curves.png, one panel for each quantity.

    ``train/loss``, ``train/loss_epoch`` and ``val/loss`` share the panel *loss*, and all that
    Lightning's LearningRateMonitor logs share one. A result of testing is a dashed line with its value
    in the legend.

    Returns:
        The picture's path, or None where nothing was logged.
    """
    panels: dict[str, list[tuple[str, Points]]] = defaultdict(list)
    for name, points in sorted(read_metrics(folder).items(), key=_reading_order):
        panels[_quantity(name)].append((name, points))
    if not panels:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (quantity, curves) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, quantity, curves)
    path = folder / CURVES_FILE
    with mpl.rc_context({"font.size": 9}):
        figure.savefig(path, dpi=130)
    return path


def _quantity(name: str) -> str:
    """The panel that a metric belongs to."""
    if name.startswith("lr-"):
        return "learning rate"
    stage, _, quantity = name.rpartition("/")
    return quantity.removesuffix("_step").removesuffix("_epoch") if stage in _COLOURS else name


def _reading_order(item: tuple[str, Points]) -> tuple[int, str]:
    """Sort by stage in the order train, validation, test, then by name; other metrics come last."""
    stage = item[0].split("/")[0]
    stages = list(_COLOURS)
    return (stages.index(stage) if stage in stages else len(stages), item[0])


def _draw_panel(axes: Axes, quantity: str, curves: list[tuple[str, Points]]) -> None:
    for name, points in curves:
        colour = _COLOURS.get(name.split("/")[0])
        steps, values = zip(*points, strict=True)
        if name.startswith("test/"):
            axes.axhline(values[-1], color=colour, linestyle="--", label=f"{name} {values[-1]:.4g}")
            continue
        marker = "." if len(points) < _MANY_POINTS else ""
        axes.plot(steps, values, marker=marker, linewidth=1.2, color=colour, label=name)
    axes.set_title(quantity)
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1 or curves[0][0] != quantity:
        axes.legend(frameon=False)


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Print ``rows`` as a two-column table; floats with four digits, paths as seen from here.

    Brackets are no markup.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(_text(value)))
    show(table)


def show(table: Table) -> None:
    """Print ``table``. What is too long for a terminal is folded; in a pipe nothing is."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not console.is_terminal:
        console.width = 10_000
        console.width = Measurement.get(console, console.options, table).maximum
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, Path) and value.is_relative_to(Path.cwd()):
        value = value.relative_to(Path.cwd())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
