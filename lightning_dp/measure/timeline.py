"""``StepTimeline``: one optimizer step of every rank, as a Chrome trace and as a picture."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from lightning_dp.engine.reduction.timing import ReductionTimes
from lightning_dp.internals.lightning import Callback, pl

log = logging.getLogger(__name__)

Span = tuple[str, str, float, float]  # lane, name, start and end in seconds

COLORS = {"forward": "#8fb8de", "backward": "#4a78a8", "exposed": "#d1495b", "optimizer": "#9a8c98"}


class StepTimeline(Callback):
    """Records one step: computing, each bucket on the wire, and the tail that was not hidden.

    Writes ``timeline.json`` (open it in a trace viewer such as Perfetto) and ``timeline.png``. With
    strategies other than ``lean_ddp`` it does nothing.

    Args:
        step: The optimizer step to record, counted from 0. The first ones learn the order of buckets
            and are not typical.
        dirpath: Where the files go; the Trainer's ``default_root_dir`` if ``None``.

    Attributes:
        picture: Where ``timeline.png`` was written; on rank 0, after the step.
    """

    def __init__(self, step: int = 10, dirpath: str | Path | None = None) -> None:
        if step < 0:
            raise ValueError(f"step={step} is not possible; it must be 0 or more.")
        self.step = step
        self.dirpath = dirpath
        self.picture: Path | None = None
        self._marks: dict[str, float] = {}
        self._recording = False
        self._done = False

    def _mark(self, name: str) -> None:
        if self._recording:
            self._marks[name] = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Begin to record with the first micro-batch at or after ``step``."""
        watch = getattr(trainer.strategy, "watch_collectives", None)
        if self._done or watch is None or trainer.global_step < self.step:
            return
        self._recording = True
        watch(True)
        self._mark("start")

    def on_before_backward(self, *_: Any) -> None:
        """Forward has ended."""
        self._mark("backward")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write the step if it ended with this batch. Collective: every rank, once."""
        if not self._recording or trainer.global_step <= self.step:
            return
        self._mark("end")
        self._recording, self._done = False, True
        strategy: Any = trainer.strategy
        times = strategy.watch_collectives(False)
        spans = spans_of(self._marks, times) if times is not None else []
        everyone: list[list[Span]] = strategy.gather_objects(spans)
        if trainer.is_global_zero and any(everyone):
            folder = Path(self.dirpath or trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "timeline.json").write_text(json.dumps(chrome_trace(everyone)))
            self.picture = folder / "timeline.png"
            draw(everyone, self.picture)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Say why there is no picture."""
        watches = getattr(trainer.strategy, "watch_collectives", None) is not None
        if watches and not self._done and trainer.is_global_zero:
            log.warning(
                "lean_ddp: no timeline was drawn: StepTimeline waits for step %d, counted from 0, and"
                " training ended after %d steps.",
                self.step,
                trainer.global_step,
            )


def spans_of(marks: dict[str, float], times: ReductionTimes) -> list[Span]:
    """Turn clock readings into spans, in seconds since the batch began."""
    zero = marks["start"]
    times.settle()
    spans: list[Span] = [
        ("compute", "forward", zero, marks["backward"]),
        ("compute", "backward", marks["backward"], times.backward_end),
        ("compute", "exposed", times.backward_end, times.end),
        ("compute", "optimizer", times.end, marks["end"]),
    ]
    spans += [
        (
            f"wire {lane}",
            f"bucket {each.index}, {each.nbytes / 2**20:.1f} MiB",
            each.launched,
            each.done,
        )
        for each, lane in zip(times.buckets, _lanes(times), strict=True)
    ]
    return [
        (lane, name, start - zero, max(start, stop) - zero) for lane, name, start, stop in spans
    ]


def _lanes(times: ReductionTimes) -> list[int]:
    """Give each bucket the first lane that is free when it starts."""
    free: list[float] = []
    lanes = []
    for each in times.buckets:
        lane = next((n for n, until in enumerate(free) if until <= each.launched), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = max(each.done, each.launched)
        lanes.append(lane)
    return lanes


def chrome_trace(everyone: list[list[Span]]) -> dict[str, Any]:
    """Return the trace-event format: one process a rank, one thread a lane, microseconds."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(everyone):
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for lane, name, start, stop in spans:
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": lane.split()[0],
                    "pid": rank,
                    "tid": lane,
                    "ts": start * 1e6,
                    "dur": (stop - start) * 1e6,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(everyone: list[list[Span]], path: Path) -> None:
    """Draw one row a lane, ranks below each other, time in milliseconds."""
    from matplotlib.figure import Figure

    rows = [
        (rank, lane)
        for rank, spans in enumerate(everyone)
        for lane in dict.fromkeys(s[0] for s in spans)
    ]
    figure = Figure(figsize=(12, 0.8 + 0.35 * len(rows)))
    axes = figure.subplots()
    for place, (rank, lane) in enumerate(rows):
        for span_lane, name, start, stop in everyone[rank]:
            if span_lane != lane:
                continue
            color = COLORS.get(name, "#e9a23b")
            axes.broken_barh(
                [(start * 1e3, (stop - start) * 1e3)],
                (place - 0.4, 0.8),
                facecolor=color,
                edgecolor="white",
            )
    axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the batch began")
    total = max(stop for spans in everyone for *_, stop in spans)
    exposed = max(
        (s[3] - s[2] for spans in everyone for s in spans if s[1] == "exposed"), default=0.0
    )
    axes.set_title(
        f"One step: {total * 1e3:.0f} ms, of which exposed communication {exposed * 1e3:.1f} ms"
    )
    handles = [
        axes.barh(0, 0, color=c, label=n) for n, c in {**COLORS, "bucket": "#e9a23b"}.items()
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
