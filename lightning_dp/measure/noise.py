"""The gradient noise scale: how large a batch is useful, from norms that every step has.

With small batches ``p`` of weights ``w_p``, ``W`` together, mean gradients ``g_p`` and their weighted mean
``g``, one step gives two unbiased numbers, whatever the weights:

    T = (sum w_p |g_p|^2 - W |g|^2) / (parts - 1)     tr(Sigma), the variance of one sample's gradient
    A = |g|^2 - T / W                                 |G|^2, of the true gradient; may be negative

Each is averaged over steps, and the averages are divided: ``B_simple = T / A``. The mean of the steps'
ratios is wrong by any factor, since ``A`` of one step may be close to zero.

Source: McCandlish et al. 2018, arXiv 1812.06162, appendix A.1 (two batch sizes, averages before the ratio);
Fieller 1954 (the interval of a ratio); Johnson et al. 2020, arXiv 2007.05105 (AdaScale's gain).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class NoiseEstimate:
    """An estimate, in units of the weights (samples, if they count samples).

    Attributes:
        value: ``B_simple``; infinite where the true gradient cannot be told from zero.
        low: The lower end of its 95 % interval.
        high: The upper end; infinite where the true gradient may be zero.
        batch: The batch of one step.
        parts: Small batches in it.
    """

    value: float
    low: float
    high: float
    batch: float
    parts: float

    @property
    def batch_fraction(self) -> float:
        """``B / B_simple``: far below 1, a larger batch costs little; far above, it is wasted."""
        return self.batch / self.value if self.value else math.inf

    @property
    def extra_steps(self) -> float:
        """Steps that this batch needs, as a multiple of what the largest batch would need."""
        return 1 + self.value / self.batch

    @property
    def extra_samples(self) -> float:
        """Samples that this batch needs, as a multiple of what the smallest batch would need."""
        return 1 + self.batch_fraction

    @property
    def adascale_gain(self) -> float:
        """By what AdaScale would multiply the learning rate of one small batch."""
        small = self.batch / self.parts
        if math.isinf(self.value):
            return self.parts
        return (self.value + small) / (self.value / self.parts + small)


class NoiseAverage:
    """Averages of ``T`` and ``A`` over steps, each on its own, with their spread.

    Args:
        decay: Of the exponential average: it covers about ``1 / (1 - decay)`` steps.
    """

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.steps = 0
        self._sums = [0.0] * 7  # of T, A, T^2, A^2, T A, the batch and the parts
        self._weight = self._squares = 0.0  # of the steps' weights, and of their squares

    def add(self, part_norm: float, mean_norm: float, batch: float, parts: int) -> bool:
        """Take in a step; return whether it could be used.

        Args:
            part_norm: Sum over small batches of ``|mean gradient|^2 * weight``.
            mean_norm: ``|averaged gradient|^2``.
            batch: Sum of weights.
            parts: Small batches that counted.
        """
        if parts < 2 or batch <= 0 or not math.isfinite(part_norm + mean_norm):
            return False
        trace = (part_norm - batch * mean_norm) / (parts - 1)
        signal = mean_norm - trace / batch
        news = (trace, signal, trace**2, signal**2, trace * signal, batch, parts)
        keep = self.decay
        self._sums = [keep * old + new for old, new in zip(self._sums, news, strict=True)]
        self._weight = keep * self._weight + 1
        self._squares = keep**2 * self._squares + 1
        self.steps += 1
        return True

    def estimate(self, unit: float = 1.0) -> NoiseEstimate | None:
        """The noise scale so far; ``None`` before the third step.

        Args:
            unit: Samples for each unit of weight.
        """
        if self.steps < 3:
            return None
        t, a, tt, aa, ta, batch, parts = (total / self._weight for total in self._sums)
        share = self._squares / self._weight**2  # one over the number of steps that count
        of_mean = share / (1 - share)
        low, high = ratio_interval(
            t, a, (tt - t * t) * of_mean, (aa - a * a) * of_mean, (ta - t * a) * of_mean
        )
        value = max(0.0, t) / a if a > 0 else math.inf
        return NoiseEstimate(value * unit, low * unit, high * unit, batch * unit, parts)


def ratio_interval(
    top: float, bottom: float, var_top: float, var_bottom: float, covariance: float
) -> tuple[float, float]:
    """The interval of ``top / bottom``, both 0 or more, from the spread of two averages (Fieller 1954).

    It holds the ratios ``r`` for which ``top - r bottom`` is within ``Z`` of its standard deviations.
    """
    a = bottom**2 - Z**2 * var_bottom
    b = top * bottom - Z**2 * covariance
    c = top**2 - Z**2 * var_top
    inside = max(0.0, b * b - a * c) if a > 0 else b * b - a * c
    if inside < 0 or a == 0:
        return 0.0, math.inf  # nothing can be said
    first, second = sorted(((b - math.sqrt(inside)) / a, (b + math.sqrt(inside)) / a))
    if a < 0 or bottom <= 0:  # the true bottom may be zero: from the upper root on
        return (max(0.0, second) if c > 0 else 0.0), math.inf
    return max(0.0, first), max(0.0, second)
