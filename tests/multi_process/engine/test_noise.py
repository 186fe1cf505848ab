"""The norms behind the noise scale, on a problem whose noise is chosen: B1 to B3, and what they cost.

A parameter's gradient in step ``t`` is ``G + sqrt(Sigma / n) z``: a linear loss gives exactly that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.measure.noise import NoiseAverage
from tests.support.parity import Harness
from tests.support.ranks import run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("arithmetic on the host")]

DIM = 400
SPREAD = torch.linspace(0.8, 1.2, DIM)  # standard deviations of one sample's gradient
TRACE = float(SPREAD.square().sum())
EFFECTIVE = TRACE**2 / float(SPREAD.pow(4).sum())  # (tr Sigma)^2 / tr Sigma^2
SIGNAL = TRACE / 1000  # so that B_simple is 1000
TRUE = 1000.0
STEPS = 300
SEED = 9


@dataclass(frozen=True)
class Case:
    """Samples of each rank's micro-batches; what the loss is scaled with; when the host reads."""

    samples: tuple[tuple[float, ...], ...]
    loss_scale: float = 1.0
    deferred: bool = False

    @property
    def batch(self) -> float:
        return float(sum(map(sum, self.samples)))

    @property
    def parts(self) -> int:
        if len(self.samples) == 1:
            return len(self.samples[0])
        return sum(sum(own) > 0 for own in self.samples)


CASES = {
    2: {
        "equal": Case(((32,), (32,))),
        "windows, scaled, read late": Case(((16, 16), (16, 16)), loss_scale=1024.0, deferred=True),
    },
    4: {
        "unequal": Case(((5,), (120,), (17,), (33,))),
        "one without weight": Case(((40,), (0,), (25,), (60,))),
    },
    1: {"windows": Case(((32,) * 4,))},
}


class Chosen(nn.Module):
    """Two parameters, in two buckets."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(150)), nn.Parameter(torch.zeros(DIM - 150))


def _series(rank, world_size):
    """For each case what each step's control block says, and this rank's ``|g|^2``."""
    found = {}
    for number, (name, case) in enumerate(CASES[world_size].items()):
        torch.manual_seed(SEED + 100 * world_size + 10 * number + rank)
        found[name] = _one(rank, case)
    return found


def _one(rank, case):
    group = ReplicaGroup.create(
        torch.device("cpu"), host_reads_are_free=False if case.deferred else None
    )
    mean = torch.full((DIM,), math.sqrt(SIGNAL / DIM))
    windows, own = [], []
    module = Chosen()
    with Harness(module, group=group) as harness:
        reducer, window = harness.reducer, harness.window
        reducer.take_norms(1)
        for _ in range(STEPS):
            module.zero_grad()
            for index, samples in enumerate(case.samples[rank]):
                noise = SPREAD * torch.randn(DIM) / math.sqrt(samples or 1)
                gradient = mean + noise
                micro_batches = len(case.samples[rank])
                loss = torch.cat([module.a, module.b]) @ gradient
                window.add(samples, loss, micro_batches)
                loss = loss * samples * case.loss_scale / micro_batches
                reducer.norms.loss_scale = torch.tensor(case.loss_scale)
                reducer.norms.begin_backward(window)
                if index + 1 < micro_batches:
                    with window.closed():
                        harness.backward(loss)
                else:
                    harness.backward(loss)
                reducer.norms.end_backward(window)
            own.append(float(gradient.square().sum()))
            if not windows or reducer.settled is not windows[-1]:
                windows.append(reducer.settled)
    return windows, own


def steps_of(windows):
    """What ``NoiseAverage.add`` is given for each step."""
    return [
        (last.part_norm, this.mean_norm_before, last.weight, last.parts)
        for last, this in pairwise(windows)
    ]


def pairs(steps):
    """Each step's estimates of tr(Sigma) and |G|^2."""
    found = []
    for part_norm, mean_norm, batch, parts in steps:
        trace = (part_norm - batch * mean_norm) / (parts - 1)
        found.append((trace, mean_norm - trace / batch))
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="module")
def measured():
    return {world_size: run_ranks(_series, world_size) for world_size in CASES}


@pytest.mark.parametrize(("world_size", "name"), [(k, name) for k in CASES for name in CASES[k]])
def test_b1_b2_both_estimates_are_unbiased_and_spread_as_they_should(measured, world_size, name):
    case = CASES[world_size][name]
    for windows, _ in (rank[name] for rank in measured[world_size]):
        steps = steps_of(windows)
        assert len(steps) > STEPS - 5
        assert all(batch == case.batch and parts == case.parts for *_, batch, parts in steps)
        found = pairs(steps)
        k, batch = case.parts, case.batch
        common = 2 * TRACE**2 / EFFECTIVE
        along = float(SPREAD.square().mean()) * SIGNAL  # G' Sigma G
        spread = torch.tensor(
            [
                math.sqrt(common / (k - 1)),
                math.sqrt(4 * along / batch + common / batch**2 * k / (k - 1)),
            ]
        )
        off = (found.mean(0) - torch.tensor([TRACE, SIGNAL])).abs()
        assert (off < 3 * spread / math.sqrt(len(steps))).all(), off / spread
        assert ((found.std(0) / spread - 1).abs() < 0.1).all(), found.std(0) / spread


def test_b2_control_the_mean_number_of_samples_is_biased(measured):
    case = CASES[4]["unequal"]
    own = torch.tensor([norms for _, norms in (rank["unequal"] for rank in measured[4])]).mean(0)
    windows = measured[4][0]["unequal"][0]
    averaged = torch.tensor([this.mean_norm_before for this in windows[1:]])
    mean_samples = case.batch / 4
    trace = (own[: len(averaged)] - averaged) / (4 / case.batch - 1 / case.batch)
    assert mean_samples == 43.75
    assert float(trace.mean()) > 1.5 * TRACE


def averaged(steps):
    average = NoiseAverage(decay=1.0)  # a plain mean
    for step in steps:
        assert average.add(*step)
    return average.estimate()


def test_the_noise_scale_is_as_near_as_so_many_steps_allow(measured):
    for world_size, cases in CASES.items():
        for name, case in cases.items():
            steps = steps_of(measured[world_size][0][name][0])
            estimate = averaged(steps)
            k, batch = case.parts, case.batch
            relative = TRUE / batch * math.sqrt(2 * k / ((k - 1) * EFFECTIVE * len(steps)))
            assert abs(estimate.value / TRUE - 1) < 3 * relative, name
            assert estimate.low < TRUE < estimate.high, name
            width = (estimate.high - estimate.low) / TRUE
            assert 0.5 < width / (2 * 1.96 * relative) < 2, name


def _counted(rank, world_size):
    module = Chosen()
    totals = []
    with Harness(module) as harness:
        for on in (False, True, False):
            harness.reducer.take_norms(1 if on else None)
            spy = CollectiveSpy()
            with spy:
                for _ in range(6):
                    if on:
                        harness.window.add(1.0)
                        harness.reducer.norms.begin_backward(harness.window)
                    harness.backward((module.a.sum() + module.b.sum()) * (rank + 1))
            totals.append((spy.total, sum(spy.calls.values()), spy.openings))
    return totals


def test_no_collective_more():
    for off, on, again in run_ranks(_counted, 2):
        assert on == again
        assert off[0] >= on[0] > 0  # the first steps of all agree on buckets
