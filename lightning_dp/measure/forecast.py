"""What a run would cost on other ranks and another link: numbers in, numbers out.

    T = A f + (A - 1) b + pipeline(b) + processor + o / K^zero + d
    d = spread * sqrt(2 ln K) * A (f + b)

``f``, ``b`` and ``o`` are the forward, backward and optimizer of one rank, ``A`` micro-batches a window,
``K`` ranks. ``pipeline`` is the model that chooses bucket sizes (:mod:`lightning_dp.engine.plan.cost`), fed
with a described link in place of a measured one; ``d`` is what the slowest of ``K`` ranks is late.

Everything is an interval: of the wire's efficiency, of latency, of the spread that was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_dp.engine.plan.cost import (
    CAPS_MIB,
    MIB,
    Fabric,
    choose,
    expected_wait_s,
)
from lightning_dp.engine.plan.cut import SlotSpec
from lightning_dp.errors import ConfigError, some_names

VERSION = 1
MOST = 1e18  # seconds, bytes, samples: beyond, sums overflow
# Bytes of a gradient on the wire, as a share of fp32; int8 travels in blocks of 256 with one fp32 scale.
WIRES = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": (1 + 4 / 256) / 4}
# What of a link's nominal rate gradients get: at worst, as a rule, at best.
EFFICIENCY = (0.7, 0.92, 0.97)
LATENCY_FACTOR = (2.0, 1.0, 0.5)
SIZES_MIB = (1600.0, 800.0, 400.0, 200.0, 100.0, 50.0, *CAPS_MIB)  # many ranks ask for large ones
MOST_SLOTS = 100  # gradients that arrive next to each other are taken together beyond that


@dataclass(frozen=True)
class RunProfile:
    """What one rank alone was measured to do.

    Attributes:
        name: Of the run.
        samples: In a micro-batch.
        forward_s: Seconds from a batch's start to its backward, loading included.
        backward_s: Seconds of a backward.
        optimizer_s: Seconds from a backward's end to the batch's, loggers included.
        gradients: When each gradient arrived, in seconds since the backward began, and its fp32 bytes.
        parameter_bytes: Of the module, buffers too.
        optimizer_bytes: Of the optimizer's state.
        activation_bytes: Kept for the backward of one micro-batch.
        spread: Standard deviation of a step, relative.
        cpu_s_per_byte: Processor seconds for each byte that a rank sends and receives.
        codec_s_per_byte: Processor seconds to encode and decode one fp32 byte, by wire.
        shared: Bandwidth (bytes a second) and latency (s) of two ranks in this machine's shared memory, if
            measured.
        loopback: The same over its network interface.
    """

    name: str
    samples: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients: tuple[tuple[float, int], ...]
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    spread: float = 0.02
    cpu_s_per_byte: float = 0.0
    codec_s_per_byte: dict[str, float] | None = None
    shared: tuple[float, float] | None = None
    loopback: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse what nothing can have measured.

        Raises:
            ConfigError: Names the field.
        """
        for name in ("samples", "backward_s", "parameter_bytes"):
            if not _amount(getattr(self, name), least=1 / MOST):
                raise ConfigError(f"profile: {name}={getattr(self, name)!r}; it must be above 0.")
        for name in ("forward_s", "optimizer_s", "optimizer_bytes", "activation_bytes", "spread",
                     "cpu_s_per_byte"):  # fmt: skip
            if not _amount(getattr(self, name)):
                raise ConfigError(f"profile: {name}={getattr(self, name)!r}; it must be 0 or more.")
        if not self.gradients or not _pairs(self.gradients, 0.0, 1):
            raise ConfigError(
                "profile: gradients must be pairs of seconds (0 or more) and bytes (above 0), at least one."
            )
        codecs = {} if self.codec_s_per_byte is None else self.codec_s_per_byte
        if not isinstance(codecs, dict) or not all(map(_amount, codecs.values())):
            raise ConfigError("profile: codec_s_per_byte must be seconds (0 or more) by wire.")
        for name in ("shared", "loopback"):
            pair = getattr(self, name)
            if pair is not None and not _pairs((pair,), 1 / MOST, 0.0):
                raise ConfigError(
                    f"profile: {name}={pair!r}; it must be bytes a second (above 0), seconds (0 or more)."
                )

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients, in fp32."""
        return sum(nbytes for _, nbytes in self.gradients)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> RunProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: It is no such file, or one of another version.
        """
        again = "Make a new one with lean-ddp plan measure."
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file. {again}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no profile: {error}. {again}") from None
        version = values.pop("version", None) if isinstance(values, dict) else None
        if version != VERSION:
            raise ConfigError(
                f"{path} is of version {version}, and this program reads version {VERSION}. {again}"
            )
        known = {field.name for field in fields(cls)}
        if wrong := [*(set(values) - known), *(known - set(values))]:
            raise ConfigError(
                f"{path}: {some_names(sorted(wrong))} is missing or not known. {again}"
            )
        return cls(**{name: tuples(value) for name, value in values.items()})


def tuples(value: Any) -> Any:
    """Lists of JSON as they are in a profile."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def _amount(value: Any, least: float = 0.0) -> bool:
    """Whether it is a number that something can have been measured to be."""
    return isinstance(value, (int, float)) and least <= value <= MOST


def _pairs(values: Any, first: float, second: float) -> bool:
    """Whether each is a pair of amounts, of at least so much."""
    return isinstance(values, tuple) and all(
        isinstance(v, tuple) and len(v) == 2 and _amount(v[0], first) and _amount(v[1], second)
        for v in values
    )


@dataclass(frozen=True)
class Job:
    """How gradients are averaged.

    Attributes:
        wire: Of ``WIRES``.
        accumulate: Micro-batches a window.
        zero: 1 shards the optimizer's state.
        gather: Of ``zero``: "step" or "forward", as the option.
        outer: Steps between two averages of parameters; 1 averages gradients in each.
        fragments: Of ``outer``: parts of the model that travel in turns.
        delay: Of ``outer``: steps that hide a part's way.
        batch: Samples per step over all ranks; ``None`` keeps the measured micro-batch on each rank.
        bucket_mib: ``None`` chooses.
    """

    wire: str = "fp32"
    accumulate: int = 1
    zero: int = 0
    gather: str = "step"
    outer: int = 1
    fragments: int = 1
    delay: int = 0
    batch: int | None = None
    bucket_mib: float | None = None


@dataclass(frozen=True)
class Forecast:
    """One number of ranks.

    Attributes:
        ranks: How many.
        step_s: Seconds of an optimizer step, as a rule.
        low_s: At best.
        high_s: At worst.
        exposed_s: Of it, waiting for the link.
        hidden: Share of the link's time that computing hides; 1 where there is none.
        samples_per_s: Over all ranks.
        efficiency: Of that, as a share of ``ranks`` times one rank alone.
        memory_bytes: Of a rank's tensors.
        sent_bytes: By a rank, in a step.
        bucket_mib: Of most buckets.
    """

    ranks: int
    step_s: float
    low_s: float
    high_s: float
    exposed_s: float
    hidden: float
    samples_per_s: float
    efficiency: float
    memory_bytes: float
    sent_bytes: float
    bucket_mib: float


def forecast(
    profile: RunProfile,
    fabric: Fabric,
    job: Job,
    ranks: int,
    efficiency: tuple[float, float, float] = EFFICIENCY,
) -> Forecast | None:
    """Predict a step; ``None`` where a rank would have less than one sample.

    Args:
        profile: Of one rank.
        fabric: At its nominal rates.
        job: What is asked for.
        ranks: On how many.
        efficiency: What of the nominal rates gradients get: at worst, as a rule, at best.
    """
    job = _as_it_travels(job, fabric, ranks)
    samples = job.batch / (ranks * job.accumulate) if job.batch else profile.samples
    if samples < 1:
        return None
    scale = samples / profile.samples
    fabrics = [
        _at(fabric, share, late) for share, late in zip(efficiency, LATENCY_FACTOR, strict=True)
    ]
    caps = _caps(profile, fabrics[1], job, ranks, scale)
    (worst, *_), (rule, exposed, wire), (best, *_) = (
        _step(profile, each, job, ranks, scale, caps) for each in fabrics
    )
    computing = job.accumulate * (profile.forward_s + profile.backward_s) * scale
    straggling = profile.spread * math.sqrt(2 * math.log(ranks)) * computing
    step_s = rule + straggling
    alone = profile.samples / (
        profile.forward_s + profile.backward_s + profile.optimizer_s / job.accumulate
    )
    per_s = samples * ranks * job.accumulate / step_s
    return Forecast(
        ranks=ranks,
        step_s=step_s,
        low_s=best * (1 - profile.spread),
        high_s=(worst + 2 * straggling) * (1 + profile.spread),
        exposed_s=exposed,
        hidden=1 - exposed / wire if wire else 1.0,
        samples_per_s=per_s,
        efficiency=per_s / (ranks * alone),
        memory_bytes=memory_bytes(profile, job, ranks, scale),
        sent_bytes=sent_bytes(profile, job, ranks),
        bucket_mib=0.0 if ranks == 1 or job.outer > 1 else caps[0] / MIB,
    )


def _as_it_travels(job: Job, fabric: Fabric, ranks: int) -> Job:
    """In shared memory nothing is sent, and nothing rounded."""
    in_memory = ranks <= fabric.ranks_per_host and fabric.inner_busy == 1.0
    return replace(job, wire="fp32") if in_memory else job


def _at(fabric: Fabric, efficiency: float, late: float) -> Fabric:
    """The fabric at a share of its rates."""
    return replace(
        fabric,
        bandwidth=fabric.bandwidth * efficiency,
        latency_s=fabric.latency_s * late,
        inner_bandwidth=fabric.inner_bandwidth * efficiency,
        inner_latency_s=fabric.inner_latency_s * late,
    )


def _caps(
    profile: RunProfile, fabric: Fabric, job: Job, ranks: int, scale: float
) -> tuple[int, int, int]:
    """Most bytes of a bucket, of the first, of the last."""
    if job.bucket_mib is not None:
        cap = max(1, int(job.bucket_mib * MIB))
        return cap, min(cap, MIB), min(cap, MIB)
    arrivals, specs = _slots(profile, job.wire, scale)
    link = fabric.link(ranks, 0.5 if job.zero else 1.0)
    backward_s = profile.backward_s * scale
    gradients = sum(spec.nbytes for spec in specs) / MIB
    whole = min((size for size in SIZES_MIB if size >= gradients), default=SIZES_MIB[0])
    sizes = [size for size in SIZES_MIB if size <= whole]  # larger ones hold nothing more
    return choose(arrivals, specs, backward_s, link, sizes, fabric.message_s).caps


def _step(
    profile: RunProfile,
    fabric: Fabric,
    job: Job,
    ranks: int,
    scale: float,
    caps: tuple[int, int, int],
) -> tuple[float, float, float]:
    """Seconds of a step, of waiting in it, of the wire."""
    forward_s, backward_s = profile.forward_s * scale, profile.backward_s * scale
    optimizer_s = profile.optimizer_s / (ranks if job.zero else 1)
    computing = job.accumulate * (forward_s + backward_s) + optimizer_s
    if ranks == 1:
        return computing, 0.0, 0.0
    codec = (profile.codec_s_per_byte or {}).get(job.wire, 0.0) * profile.gradient_bytes
    link = fabric.link(ranks, 0.5 if job.zero else 1.0)
    if job.outer > 1:
        nbytes = round(profile.gradient_bytes * WIRES[job.wire] / job.fragments)
        wire = link.latency_s + link.seconds(nbytes)
        exposed = max(0.0, wire - job.delay * computing)  # of one part
        parts = job.fragments / job.outer  # in a step
        return computing + codec / job.outer + exposed * parts, exposed * parts, wire * parts
    arrivals, specs = _slots(profile, job.wire, scale)
    calm = replace(link, busy=0.0)
    wait, count = expected_wait_s(arrivals, specs, backward_s, calm, caps)
    busy_s = sum(link.seconds(spec.nbytes) - link.gap_s for spec in specs) + count * link.gap_s
    # What the wire does on the processor beside the backward makes that longer; the rest is waited for.
    processor = link.busy * max(0.0, busy_s - wait) + count * fabric.message_s
    stretch = 1 + processor / backward_s
    late = [seconds * stretch for seconds in arrivals]
    exposed, _ = expected_wait_s(late, specs, backward_s * stretch, calm, caps)
    wire = busy_s + link.latency_s
    if job.zero:  # parameters come back when the optimizer has stepped
        gather = fabric.link(ranks, 0.5)
        back = gather.latency_s + gather.seconds(profile.parameter_bytes)
        hidden = forward_s if job.gather == "forward" else 0.0
        exposed, wire = exposed + max(gather.latency_s, back - hidden), wire + back
    return computing + exposed + processor + codec, exposed, wire


def _slots(profile: RunProfile, wire: str, scale: float) -> tuple[list[float], list[SlotSpec]]:
    """Gradients as the bucket model takes them: in order of arrival, neighbours together if many."""
    ordered = sorted(profile.gradients)
    every = max(1, math.ceil(len(ordered) / MOST_SLOTS))
    chunks = [ordered[i : i + every] for i in range(0, len(ordered), every)]
    arrivals = [chunk[-1][0] * scale for chunk in chunks]
    sizes = [round(sum(n for _, n in chunk) * WIRES[wire]) for chunk in chunks]
    return arrivals, [SlotSpec(index, size, ()) for index, size in enumerate(sizes)]


def sent_bytes(profile: RunProfile, job: Job, ranks: int) -> float:
    """Bytes that a rank sends in a step, and receives as many: what every bandwidth-optimal way costs.

    2 (K - 1) / K * s,   once in ``outer`` steps;   zero: half of it gradients, half parameters
    """
    share = (ranks - 1) / ranks
    gradients = profile.gradient_bytes * WIRES[job.wire]
    if job.zero:
        return share * (gradients + profile.parameter_bytes)
    return 2 * share * gradients / job.outer


def memory_bytes(profile: RunProfile, job: Job, ranks: int, scale: float = 1.0) -> float:
    """Bytes of a rank's tensors: parameters, gradients, optimizer state, activations of a micro-batch."""
    state = profile.optimizer_bytes / (ranks if job.zero else 1)
    outer = 2 * profile.gradient_bytes if job.outer > 1 else 0  # the anchor and the outer momentum
    return (
        profile.parameter_bytes
        + profile.gradient_bytes
        + state
        + outer
        + profile.activation_bytes * scale
    )


# What it means


def stops_paying(rows: Sequence[Forecast]) -> int | None:
    """From how many ranks on twice as many bring less than 1.5 times the samples a second.

    Args:
        rows: In order of ranks.
    """
    for row, later in pairwise(rows):
        doublings = math.log2(later.ranks / row.ranks)
        if later.samples_per_s < row.samples_per_s * 1.5**doublings:
            return row.ranks
    return None


def measures(profile: RunProfile, fabric: Fabric, job: Job, ranks: int) -> list[tuple[str, float]]:
    """What could be changed, and by how much each change multiplies samples a second, the best first.

    Args:
        profile: Of one rank.
        fabric: At its nominal rates.
        job: As it is.
        ranks: On how many.
    """
    base = forecast(profile, fabric, job, ranks)
    if base is None:
        return []
    kept = replace(
        job, batch=None
    )  # more accumulation at one batch would mean smaller micro-batches
    options: list[tuple[str, Job]] = [
        ("bucket_cap_mb=auto", replace(job, bucket_mib=None)),
        ("wire=bf16", replace(job, wire="bf16")),
        ("wire=int8", replace(job, wire="int8")),
        (
            f"accumulate={4 * job.accumulate} (a larger batch)",
            replace(kept, accumulate=4 * job.accumulate),
        ),
        ("outer=50 (other mathematics)", replace(job, outer=50, zero=0, gather="step")),
    ]
    if job.outer == 1:  # the two exclude each other
        options += [
            ("zero=1", replace(job, zero=1)),
            ("zero={gather: forward}", replace(job, zero=1, gather="forward")),
        ]
    found = []
    for name, other in options:
        row = forecast(profile, fabric, other, ranks) if other != job else None
        if row is not None:
            found.append((name, row.samples_per_s / base.samples_per_s))
    return sorted(found, key=lambda pair: -pair[1])


def zero_helps_memory(profile: RunProfile) -> bool:
    """Whether there is optimizer state to be sharded."""
    return profile.optimizer_bytes > 0.01 * profile.gradient_bytes
