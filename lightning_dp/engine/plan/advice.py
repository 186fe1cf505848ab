"""What a smaller wire would gain on this link: said once, never done unasked, because it costs accuracy."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dp.engine.plan.cost import MIB, Choice, Link, choose
from lightning_dp.engine.plan.cut import SlotSpec
from lightning_dp.engine.wires.codec import Codec, Half, Int8, add_others, encode_others

log = logging.getLogger(__name__)

WORTH = 0.05  # of the backward and the wait after it; what is less is not said


@dataclass(frozen=True)
class Backward:
    """A backward that was measured.

    Attributes:
        arrivals_s: When each slot's gradient arrived, seconds since it began, ascending.
        specs: The slots, in the same order.
        duration_s: How long it took.
    """

    arrivals_s: Sequence[float]
    specs: Sequence[SlotSpec]
    duration_s: float

    @property
    def fp32_bytes(self) -> int:
        """Bytes of the gradients that a codec writes otherwise."""
        return sum(spec.nbytes for spec in self.specs if spec.key[0] == str(torch.float32))

    def ratio(self, of_fp32: float) -> float:
        """Which part of all bytes is sent by a wire that sends ``of_fp32`` of those of fp32."""
        total = sum(spec.nbytes for spec in self.specs)
        return 1.0 - (1.0 - of_fp32) * self.fp32_bytes / total if total else 1.0


@dataclass(frozen=True)
class Gain:
    """What one codec is expected to gain.

    Attributes:
        name: The codec's.
        saved_s: Seconds a step, after what coding costs.
        share: The same as a share of the backward and the wait after it.
    """

    name: str
    saved_s: float
    share: float


def gains(
    backward: Backward, link: Link, exposed_s: float, coding_s_per_byte: dict[Codec, float]
) -> list[Gain]:
    """Return what each codec is expected to gain; below 0 where coding costs more than is waited for.

    Args:
        backward: As measured.
        link: As measured.
        exposed_s: Expected wait after the backward without a codec.
        coding_s_per_byte: Processor seconds a byte of fp32, by codec.
    """
    found = []
    for codec, cost in coding_s_per_byte.items():
        coded = link.coded(backward.ratio(codec.ratio))
        choice = choose(backward.arrivals_s, backward.specs, backward.duration_s, coded)
        saved = exposed_s - choice.exposed_s - cost * backward.fp32_bytes
        found.append(Gain(codec.name, saved, saved / (backward.duration_s + exposed_s)))
    return found


def coding_s_per_byte(codec: Codec, ranks: int) -> float:
    """Time what a rank does for one bucket of a MiB of fp32; the best of three. Local."""
    n = -(-MIB // 4 // ranks // codec.block) * codec.block
    values = torch.full((ranks, n), 0.5, device="cpu")
    rows = torch.zeros_like(codec.message(ranks, n), device="cpu")

    def once() -> float:
        begin = time.perf_counter()
        encode_others(codec, values, rows, 0)
        add_others(codec, rows, values[0], 0)
        codec.encode(values[:1], rows[:1])
        codec.decode(rows, values)
        return time.perf_counter() - begin

    return min(once() for _ in range(3)) / (4 * ranks * n)


def advice(found: Sequence[Gain], exposed_s: float, duration_s: float) -> str | None:
    """Return one sentence for what is worth it, or ``None``."""
    worth = [
        f"wire={gain.name} would save about {gain.saved_s * 1e3:.0f} ms a step ({gain.share:.0%})"
        for gain in found
        if gain.share >= WORTH
    ]
    if not worth:
        return None
    return (
        f"lean_ddp: of {(duration_s + exposed_s) * 1e3:.0f} ms of backward and wait for gradients,"
        f" {exposed_s * 1e3:.0f} are the wait; {', '.join(worth)}. It rounds gradients: see docs/wires.md."
    )


def say_advice(backward: Backward, link: Link, choice: Choice, ranks: int) -> None:
    """Log what a codec would gain, if it is worth it. Local; takes some milliseconds."""
    codecs: list[Codec] = [Half(torch.bfloat16), Int8()]
    costs = {codec: coding_s_per_byte(codec, ranks) for codec in codecs}
    text = advice(
        gains(backward, link, choice.exposed_s, costs), choice.exposed_s, backward.duration_s
    )
    if text is not None:
        log.info(text)
