"""Random modules, windows, inner backwards and freezing: a step in shares is the whole step, to the bit."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.engine.bucket import Slicing
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.shard import ShardWire
from tests.multi_process.optim.test_step_bits import assert_same_bytes, shards
from tests.support.drawn_runs import run_window
from tests.support.draws import Draw, draw
from tests.support.parity import Harness, assert_equal_on_all_ranks
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]
DRAWS = 20


def _reduces_once(drawn: Draw) -> bool:
    """Whether no window adds to gradients that are averaged: only then a rank can do with its own."""
    micros = [micro for window in drawn.windows for by_rank in window for micro in by_rank]
    return not drawn.every and not any(micro.twice for micro in micros)


def _steps(
    drawn: Draw, rank: int, group: ReplicaGroup, *, zero: bool, halves: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters after a step behind every window, and the whole state on rank 0.

    The wire adds in the order of ranks, however parameters lie in buckets.
    """
    module = drawn.make()
    optimizer = torch.optim.Adagrad(module.parameters(), 0.05)  # takes sparse and complex gradients
    options = LayoutOptions(*drawn.caps, drawn.reduce_dtype, slicing=Slicing(group.world_size))
    with Harness(
        module,
        options=options,
        wire=lambda g: ShardWire.connect(g, gathers=not (zero and halves)),
        deferred=("*",) if drawn.tells_late else (),
        group=group,
    ) as harness:
        (sharded,) = shards(harness, [optimizer]) if zero else (None,)
        for window in range(len(drawn.windows)):
            harness.window.step = window
            optimizer.zero_grad(set_to_none=drawn.to_none)
            harness.before_step()
            run_window(drawn, module, window, rank, harness)
            optimizer.step()
        harness.reducer.settle()
        state = optimizer.state_dict() if sharded is None else sharded.state_dict(group)
        if sharded is not None:
            sharded.close()
    return dict(module.named_parameters()), state


def _draws(rank: int, world_size: int) -> Counter[str]:
    warnings.simplefilter("ignore")  # torch's, about checkpoints whose input needs no gradient
    groups = {
        deferred: ReplicaGroup.create(torch.device("cpu"), host_reads_are_free=not deferred)
        for deferred in (False, True)
    }
    ran: Counter[str] = Counter()
    for seed in range(DRAWS):
        drawn = draw(seed, world_size)
        if drawn.frozen_on is not None:
            continue  # ends with an error
        group, halves = groups[drawn.deferred], _reduces_once(drawn) and not drawn.shared_memory
        where = f"draw with seed {seed} at world size {world_size}"
        parameters, state = _steps(drawn, rank, group, zero=True, halves=halves)
        expected, plain = _steps(drawn, rank, group, zero=False, halves=halves)
        assert_same_bytes(parameters, expected, where)
        assert_equal_on_all_ranks(parameters)
        if rank == 0:
            assert_same_bytes(state, plain, where)
        ran["halves" if halves else "whole"] += 1
    return ran


@both_worlds
def test_z1_random_modules_and_windows(world_size):
    ran = run_ranks(_draws, world_size, timeout_s=240)[0]
    assert min(ran["halves"], ran["whole"]) > 2
