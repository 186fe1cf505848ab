"""Step statistics from clock readings; the union of spans and nccl-tests' bus bandwidth."""

import pytest

from lightning_dp.engine.control import CONTROL_SIZE, Control, WindowTotals
from lightning_dp.engine.reduction.timing import BucketTimes, ReductionTimes
from lightning_dp.measure.stats import step_stats


def times():
    t = ReductionTimes(begin=10.0)
    t.buckets = [
        BucketTimes(0, 1_000_000, ready=10.1, launched=10.1, done=10.3),
        BucketTimes(1, 3_000_000, ready=10.2, launched=10.2, done=10.5),
        BucketTimes(2, 1_000_000, ready=10.6, launched=10.6, done=10.8),
    ]
    t.backward_end = 10.7
    t.exposed_s = 0.1
    return t


def test_spans_are_united_before_shares_are_taken():
    stats = step_stats(times(), None, 2)
    assert stats.wire_ms == pytest.approx(600)
    assert stats.exposed_ms == pytest.approx(100)
    assert stats.hidden_pct == pytest.approx(100 * 5 / 6)
    assert stats.bytes == 5_000_000
    assert stats.bus_gb_s == pytest.approx(5e6 / 0.6 * 2 * 1 / 2 / 1e9)
    assert stats.backward_ms == pytest.approx(700)


def test_the_spread_over_ranks_comes_from_two_means():
    means = [0.0] * CONTROL_SIZE
    means[Control.WEIGHT] = 4.0
    means[Control.LOSS] = 2.0
    means[Control.BACKWARD_S] = 2.0  # ranks took 1 s and 3 s
    means[Control.BACKWARD_S2] = 5.0
    totals = WindowTotals.from_means(means, 2)
    stats = step_stats(times(), totals, 2)
    assert stats.straggler_ms == pytest.approx(1000)
    assert stats.loss == 0.5
    assert stats.window_weight == 8
