"""Automatic bucket sizes change the layout once, on all ranks alike, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.engine.plan import retune
from lightning_dp.engine.plan.cost import Link
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.plan.retune import TUNE_AT
from tests.support.logs import log_lines
from tests.support.parity import check
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]
MIB = 2**20


def wide() -> nn.Module:
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])


def step(module, backward, index, rank):
    backward(module(torch.randn(2, 512)).square().mean())


def _tuned(rank, world_size):
    options = LayoutOptions(cap_bytes=4 * MIB, first_bytes=MIB, last_bytes=MIB, tune=True)
    launches = check(rank, world_size, wide, step, steps=6, options=options)
    return [[(names, nbytes) for _, names, nbytes in each] for each in launches]


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_right_before_and_after_tuning(world_size):
    by_rank = run_ranks(_tuned, world_size)
    assert all(each == by_rank[0] for each in by_rank), "all ranks send the same buckets"
    before, after = by_rank[0][TUNE_AT - 1], by_rank[0][TUNE_AT]
    assert by_rank[0][TUNE_AT + 1] == after, "fixed from then on"
    names = sorted(name for bucket, _ in after for name in bucket)
    assert names == sorted(name for bucket, _ in before for name in bucket)


def _advised(rank, world_size, advise):
    retune.measure_link = lambda group: Link(1e-4, 1e-6)
    lines = log_lines("lightning_dp.engine.plan.advice")
    options = LayoutOptions(4 * MIB, MIB, MIB, tune=True, advise=advise)
    check(rank, world_size, wide, step, steps=6, options=options)
    return lines


def test_on_a_slow_link_rank_0_says_once_what_rounding_would_gain():
    said = run_ranks(_advised, 2, True)
    assert [len(lines) for lines in said] == [1, 0]
    assert "wire=bf16 would save about" in said[0][0]
    assert "wire=int8 would save about" in said[0][0]
    assert run_ranks(_advised, 2, False) == [[], []], "not to who has chosen"
