"""The test tools themselves: a tool that cannot fail proves nothing."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.kinds import AUTOCAST, KINDS, TRUE, Kind, each_kind, kinds
from tests.support.nets import data, net
from tests.support.parity import check
from tests.support.ranks import RankError, run_ranks


def _sum(rank: int, world_size: int) -> float:
    x = torch.tensor(float(rank + 1))
    dist.all_reduce(x)
    return float(x)


@pytest.mark.multi_process
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_really_communicate(world_size):
    assert run_ranks(_sum, world_size) == [world_size * (world_size + 1) / 2] * world_size


def _one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("boom on rank 1")
    time.sleep(60)


@pytest.mark.multi_process
def test_first_failure_ends_all_ranks_and_keeps_its_traceback():
    begin = time.monotonic()
    with pytest.raises(RankError, match="boom on rank 1") as caught:
        run_ranks(_one_raises, 2, grace_s=0.2)
    assert time.monotonic() - begin < 10
    assert set(caught.value.tracebacks) == {1}


def _hangs(rank: int, world_size: int) -> None:
    time.sleep(60)


@pytest.mark.multi_process
def test_timeout_fails_the_test():
    with pytest.raises(RankError, match="timed out"):
        run_ranks(_hangs, 2, timeout_s=0.5)


def _dies(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    time.sleep(0.5)  # a rank that has left already would fail the other one's start


@pytest.mark.multi_process
def test_a_silent_death_is_a_failure():
    with pytest.raises(RankError, match="0: 7"):
        run_ranks(_dies, 2)


def test_the_table_of_kinds_has_every_combination_once():
    assert len({str(kind) for kind in KINDS}) == len(KINDS) == 5 * 5 * 2**3
    assert kinds(precision="16-true", wire=("hook", "group"), deferred=True, inside=False) == [
        Kind("16-true", wire, True, False, first)
        for wire in ("group", "hook")
        for first in (False, True)
    ]
    both = kinds(namespace=("lightning.pytorch", "pytorch_lightning"))
    assert len({str(kind) for kind in both}) == 2 * len(KINDS)
    assert len(each_kind(sample=7).args[1]) == -(-len(KINDS) // 7)


@pytest.mark.parametrize(
    "kind", kinds(wire="group", deferred=False, inside=False, first_step=False)
)
def test_a_cpu_trains_in_every_precision_of_the_table(kind):
    module = kind.convert(torch.nn.Linear(2, 2))
    with kind.autocast():
        out = module(torch.ones(3, 2, dtype=kind.parameters))
    out.float().sum().backward()
    assert module.weight.grad.dtype == kind.parameters
    assert out.dtype == {**AUTOCAST, **TRUE}.get(kind.precision, torch.float32)


def _averages(rank, world_size, kind):
    def step(module, backward, index, rank):
        with kind.autocast():
            loss = module(data(dtype=kind.parameters)).square().mean()
        backward(loss)

    check(
        rank,
        world_size,
        lambda: kind.convert(net(2).float()),
        step,
        steps=4,
        **kind.harness_options(),
    )


@pytest.mark.multi_process
@each_kind(inside=False, first_step=False, precision=("fp32", "bf16-true"))
def test_every_kind_of_wire_and_reading_runs_in_the_harness(kind, monkeypatch):
    kind.apply(monkeypatch)
    run_ranks(_averages, 2, kind)
