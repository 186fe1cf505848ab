"""200 random modules with random accumulation: gradients equal to the reference, ``None`` included."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.comm_hook import CommHookWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.engine.wires.wire import Done
from tests.support.draws import Draw, Micro, draw
from tests.support.parity import (
    Harness,
    as_bytes,
    grads,
    make_group,
    mean_over_ranks,
    plain_backward,
)
from tests.support.ranks import RankError, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("each_wire")]
DRAWS = 200
RELATIVE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.complex64: 3e-5, torch.bfloat16: 3e-2}


def _loss(module, micro: Micro, drawn: Draw):
    tokens = torch.randint(9, (5,))
    loss = module(tokens, micro.used)
    if micro.lost:
        loss = torch.zeros((), dtype=loss.dtype, requires_grad=True)
    if drawn.weighted:
        loss = loss * (0.0 if micro.lost else micro.weight)
    return loss


def _backward(loss, micro: Micro, backward):
    backward = plain_backward if micro.raw and not micro.lost else backward
    if micro.twice:
        backward(loss, retain_graph=True)
    backward(loss)


def _run(drawn: Draw, module, window: int, rank: int, harness: Harness | None) -> None:
    """One accumulation window on this rank, with the engine or without."""
    micros = drawn.windows[window]
    for index, by_rank in enumerate(micros):
        micro = by_rank[rank]
        torch.manual_seed(1000 * drawn.seed + 100 * window + 10 * index + rank)
        loss = _loss(module, micro, drawn)
        if harness is None:
            _backward(loss, micro, plain_backward)
            continue
        if drawn.weighted:
            harness.window.add(0.0 if micro.lost else micro.weight)
        last = index == len(micros) - 1
        harness.window.ends = last
        held = contextlib.nullcontext() if last or drawn.every else harness.window.closed()
        with held:
            _backward(loss, micro, harness.backward)
            if last or drawn.every:
                harness.reducer.finalize()  # as before a step, for what a raw backward left


def _expected(drawn: Draw, plain, window: int):
    mean = mean_over_ranks(grads(plain), plain)
    micros = drawn.windows[window]
    if not drawn.weighted:
        return mean
    total = sum(0.0 if m.lost else m.weight for by_rank in micros for m in by_rank)
    factor = drawn.world_size / total if total else 1.0
    return {name: None if g is None else g * factor for name, g in mean.items()}


def _compare(found, expected, where: str, least: float) -> None:
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), (
            f"{where}: {name} is {'None' if got is None else 'not None'}"
        )
        if want is None:
            continue
        size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        error = float((got - want).abs().max()) if want.numel() else 0.0
        assert error <= max(RELATIVE[want.dtype], least) * size, (
            f"{where}: {name} differs by {error}"
        )


def _one(seed: int, rank: int, world_size: int, group: ReplicaGroup) -> None:
    drawn = draw(seed, world_size)
    module = drawn.make()
    plain = copy.deepcopy(module)
    wire = (lambda g: CommHookWire(g, default_hooks.allreduce_hook)) if drawn.hook else None
    deferred = ("*",) if drawn.tells_late else ()
    bits: list[bytes | bool] = []
    options = LayoutOptions(*drawn.caps, drawn.reduce_dtype)
    with Harness(module, options=options, wire=wire, deferred=deferred, group=group) as harness:
        for window in range(len(drawn.windows)):
            for m in (module, plain):
                m.zero_grad(set_to_none=drawn.to_none)
                drawn.apply_freezing(m, window)
            harness.before_step()
            _run(drawn, plain, window, rank, None)
            expected = _expected(drawn, plain, window)
            _run(drawn, module, window, rank, harness)
            found = grads(module)
            # the weights of a module of several types travel in single precision
            _compare(found, expected, f"window {window}", 1e-6 if drawn.weighted else 0.0)
            bits += [g is not None and as_bytes(g) for g in found.values()]
    digest = hashlib.sha256(repr(bits).encode()).digest()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, digest)
    assert len(set(everyone)) == 1, "the ranks' gradients are not the same bits"


def _draws(rank, world_size, seeds):
    group = make_group()
    warnings.simplefilter("ignore")  # torch's, about checkpoints whose input needs no gradient
    for seed in seeds:
        try:
            _one(seed, rank, world_size, group)
        except BaseException as error:
            raise AssertionError(
                f"draw with seed {seed} at world size {world_size}: {error}"
            ) from error


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_modules_and_windows_equal_the_reference(world_size):
    run_ranks(_draws, world_size, range(DRAWS), timeout_s=240)


def _without_average(rank, world_size, seeds):
    def nothing(self, bucket):
        bucket.allocate()
        return Done()

    AllReduceWire.launch = SharedMemoryWire.launch = nothing
    _draws(rank, world_size, seeds)


def test_control_a_missing_average_is_seen_and_its_seed_told():
    with pytest.raises(RankError, match=r"draw with seed 0 at world size 2"):
        run_ranks(_without_average, 2, range(1))
