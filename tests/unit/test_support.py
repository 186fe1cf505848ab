"""The test tools themselves: a tool that cannot fail proves nothing."""

import os
import time

import pytest
import torch
import torch.distributed as dist

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
