"""The estimator of the noise scale: its spread, its interval, and what it is used for."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp import NoiseScale
from lightning_dp.measure.noise import NoiseAverage, NoiseEstimate, ratio_interval

DIM, TRUE = 400, 1000.0
SIGNAL = DIM / TRUE  # |G|^2; the covariance is the identity


def drawn(parts, samples, steps, seed):
    """What ``steps`` steps of ``parts`` small batches of ``samples`` give to the average."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, parts, DIM, generator=generator, dtype=torch.float64)
    gradients = math.sqrt(SIGNAL / DIM) + noise / math.sqrt(samples)
    part_norms = samples * gradients.square().sum((1, 2))
    mean_norms = gradients.mean(1).square().sum(1)
    batch = parts * samples
    norms = zip(part_norms.tolist(), mean_norms.tolist(), strict=True)
    return [(part_norm, mean_norm, batch, parts) for part_norm, mean_norm in norms]


def averaged(steps):
    average = NoiseAverage(decay=1.0)
    for step in steps:
        average.add(*step)
    return average.estimate()


def test_control_the_mean_of_ratios_is_wrong_by_more_than_ten():
    wrong = {"ratios": 0, "averages": 0}
    for seed in range(50):
        steps = drawn(2, 16, 200, seed)
        pairs = [(q - batch * s, s - (q - batch * s) / batch) for q, s, batch, _ in steps]
        ratios = [trace / signal for trace, signal in pairs]
        for kind, value in (
            ("ratios", sum(ratios) / len(ratios)),
            ("averages", averaged(steps).value),
        ):
            wrong[kind] += not TRUE / 10 < value < TRUE * 10
    assert wrong["averages"] == 0
    assert wrong["ratios"] >= 20, wrong


@pytest.mark.parametrize(
    ("parts", "steps", "low", "high"),
    [(2, 50, 740, 1542), (8, 50, 939, 1051), (2, 200, 883, 1158), (8, 200, 973, 1036)],
)
def test_four_of_five_estimates_lie_where_they_should_and_intervals_hold_the_truth(
    parts, steps, low, high
):
    found = [averaged(drawn(parts, 32, steps, seed)) for seed in range(50)]
    values = sorted(each.value for each in found)
    spread = high - low
    assert abs(values[5] - low) < 0.25 * spread
    assert abs(values[44] - high) < 0.35 * spread
    assert sum(each.low <= TRUE <= each.high for each in found) >= 43


def test_an_average_follows_and_forgets():
    average = NoiseAverage(decay=0.9)
    for trace in [1.0] * 200 + [4.0] * 200:
        average.add(2 * 1.0 + trace, 1.0, 2.0, 2)  # A = 1 - T / 2
    estimate = average.estimate()
    assert average.steps == 400
    assert estimate.high == math.inf  # A is -1: the true gradient cannot be told from zero
    average = NoiseAverage(decay=0.9)
    for trace in [1.0] * 200 + [0.5] * 200:
        average.add(2 * 1.0 + trace, 1.0, 2.0, 2)
    assert average.estimate().value == pytest.approx(0.5 / 0.75)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_an_average_of_one_step_or_of_all_is_refused(decay):
    with pytest.raises(ValueError, match="above 0 and below 1"):
        NoiseScale(decay)


def test_what_says_nothing_is_left_out():
    average = NoiseAverage()
    for step in [
        (1.0, 1.0, 2.0, 1),  # one part
        (0.0, 0.0, 0.0, 2),  # no weight
        (math.inf, 1.0, 2.0, 2),  # a gradient scaler's overflow
        (1.0, math.nan, 2.0, 2),
    ]:
        assert not average.add(*step)
    assert average.estimate() is None
    for _ in range(2):
        assert average.add(3.0, 1.0, 2.0, 2)
    assert average.estimate() is None  # two steps have no spread
    average.add(3.0, 1.0, 2.0, 2)
    assert average.estimate(unit=16).batch == 32


def test_what_is_said_about_a_batch():
    found = NoiseEstimate(value=300.0, low=200.0, high=400.0, batch=100.0, parts=4)
    assert found.batch_fraction == pytest.approx(1 / 3)
    assert found.extra_steps == 4
    assert found.extra_samples == pytest.approx(4 / 3)
    # (S / S_min - 1) (E / E_min - 1) = 1
    assert (found.extra_steps - 1) * (found.extra_samples - 1) == pytest.approx(1)
    # Johnson et al.: (sigma^2 + mu^2) / (sigma^2 / S + mu^2), of small batches of 25
    assert found.adascale_gain == pytest.approx((300 / 25 + 1) / (300 / 25 / 4 + 1))
    noisy = NoiseEstimate(math.inf, 1.0, math.inf, 100.0, 4)
    assert noisy.adascale_gain == 4  # only noise: linear scaling
    assert noisy.batch_fraction == 0
    calm = NoiseEstimate(0.0, 0.0, 1.0, 100.0, 4)
    assert calm.adascale_gain == 1  # no noise: a larger batch allows no larger rate


def test_the_interval_of_a_ratio():
    low, high = ratio_interval(10.0, 2.0, 1e-12, 1e-12, 0.0)
    assert low == pytest.approx(5, rel=1e-5)
    assert high == pytest.approx(5, rel=1e-5)
    low, high = ratio_interval(10.0, 2.0, 0.25, 0.01, 0.0)
    assert low < 5 < high < 8
    # Averages that err together have a ratio that errs less.
    assert ratio_interval(10.0, 2.0, 0.25, 0.01, 0.05)[1] < high
    assert ratio_interval(10.0, 1.0, 0.25, 1.0, 0.0)[1] == math.inf  # the bottom may be zero
    assert ratio_interval(1.0, 2.0, 1.0, 0.01, 0.0)[0] == 0  # the top may be
    assert ratio_interval(0.1, 0.1, 1.0, 1.0, 0.0) == (0.0, math.inf)
