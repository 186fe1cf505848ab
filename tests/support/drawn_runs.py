"""Run draws on forked ranks: each equal to the plain-torch reference, or an error on all ranks.

python -m tests.support.drawn_runs --draws 2000 --world-size 3
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import math
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.codec import Codec, Half, Int8
from lightning_dp.engine.wires.comm_hook import CommHookWire
from lightning_dp.engine.wires.shard import ShardWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.engine.wires.wire import Wire
from lightning_dp.errors import ReplicaMismatchError
from tests.support.draws import Draw, Micro, draw
from tests.support.parity import Harness, as_bytes, grads, mean_over_ranks, plain_backward
from tests.support.ranks import run_ranks

RELATIVE = {
    torch.float64: 1e-11,
    torch.float32: 3e-5,
    torch.complex64: 3e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
# What a codec may round away, as a share of the largest local gradient; several roundings may add up.
ROUNDED = {"bf16": 0.012, "int8": 0.024}
# How long ranks wait that freeze other layers, where nobody watches over them as in a Trainer.
PATIENCE = timedelta(seconds=1)


def loss_of(module: nn.Module, micro: Micro, drawn: Draw) -> Tensor:
    loss = module(torch.randint(9, (5,)), micro.used)
    if micro.lost:
        loss = torch.zeros((), dtype=loss.dtype, requires_grad=True)
    if drawn.weighted:
        loss = loss * (0.0 if micro.lost else micro.weight)
    return loss


def _backward(loss: Tensor, micro: Micro, backward) -> None:
    backward = plain_backward if micro.raw and not micro.lost else backward
    if micro.twice:
        backward(loss, retain_graph=True)
    backward(loss)


def run_window(
    drawn: Draw, module: nn.Module, window: int, rank: int, harness: Harness | None
) -> None:
    """One accumulation window on this rank, with the engine or without."""
    micros = drawn.windows[window]
    for index, by_rank in enumerate(micros):
        micro = by_rank[rank]
        drawn.apply_freezing(module, window, index, rank)
        torch.manual_seed(1000 * drawn.seed + 100 * window + 10 * index + rank)
        with harness.window.reducing(False) if harness else contextlib.nullcontext():
            for _ in range(micro.inner):  # a step's own backwards: attacks, inner loops of others
                module(torch.randint(9, (5,)), micro.used).backward()
        loss = loss_of(module, micro, drawn)
        if harness is None:
            _backward(loss, micro, plain_backward)
            continue
        if drawn.weighted:
            harness.window.add(0.0 if micro.lost else micro.weight)
        last = index == len(micros) - 1
        harness.window.position = index
        harness.window.ends = last
        held = contextlib.nullcontext() if last or drawn.every else harness.window.closed()
        with held:
            _backward(loss, micro, harness.backward)
            if last or drawn.every:
                harness.reducer.finalize()  # as before a step, for what a raw backward left


def _expected(drawn: Draw, plain: nn.Module, window: int) -> dict[str, Tensor | None]:
    mean = mean_over_ranks(grads(plain), plain)
    if not drawn.weighted:
        return mean
    micros = drawn.windows[window]
    total = sum(0.0 if m.lost else m.weight for by_rank in micros for m in by_rank)
    factor = drawn.world_size / total if total else 1.0
    return {name: None if g is None else g * factor for name, g in mean.items()}


def _compare(
    found: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    where: str,
    tolerance: dict[torch.dtype, float],
    rounded: float,
) -> None:
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), (
            f"{where}: {name} is {'None' if got is None else 'not None'}"
        )
        if want is None or got is None or not want.numel():
            continue
        size = max(1.0, float(want.abs().max()))
        error = float((got - want).abs().max())
        most = tolerance[want.dtype] * size + (rounded if want.dtype != torch.float64 else 0.0)
        assert error <= most, f"{where}: {name} differs by {error}, not {most}"


def _rounded(drawn: Draw, plain: nn.Module, window: int, codec: Codec | None) -> float:
    """How much a codec may round away in this window; 0 without one. Collective: every rank."""
    if codec is None:
        return 0.0
    present = (grad for grad in grads(plain).values() if grad is not None and grad.numel())
    local = [grad.abs().max().double() for grad in present]
    largest = torch.stack([torch.zeros((), dtype=torch.float64), *local]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    micros = drawn.windows[window]
    total = sum(0.0 if m.lost else m.weight for by_rank in micros for m in by_rank)
    factor = drawn.world_size / total if drawn.weighted and total else 1.0
    return ROUNDED[codec.name] * len(micros) * factor * float(largest)


def _wire(drawn: Draw, group: ReplicaGroup, codec: Codec | None) -> Wire:
    if codec is not None:
        return ShardWire.connect(
            group, PATIENCE if drawn.frozen_on is not None else None, codec=codec
        )
    if drawn.hook:
        return CommHookWire(group, default_hooks.allreduce_hook)
    wire = SharedMemoryWire.connect(group, PATIENCE) if drawn.shared_memory else None
    return wire or AllReduceWire(group)


def run_draw(drawn: Draw, rank: int, group: ReplicaGroup, codec: Codec | None = None) -> None:
    """Compare every window of ``drawn`` with the reference, and the ranks' bits with each other.

    Collective: every rank.
    """
    module = drawn.make()
    plain = copy.deepcopy(module)
    if drawn.tensor_hooks:
        plain = drawn.make()  # a copy has no hooks
    options = LayoutOptions(*drawn.caps, drawn.reduce_dtype, drawn.tune)
    bits: list[bytes | bool] = []
    with Harness(
        module,
        options=options,
        wire=lambda g: _wire(drawn, g, codec),
        deferred=("*",) if drawn.tells_late else (),
        group=group,
    ) as harness:
        for window in range(len(drawn.windows)):
            harness.window.step = window
            for m in (module, plain):
                if not (window and drawn.kept[window - 1]):
                    m.zero_grad(set_to_none=drawn.to_none)
            harness.before_step()
            run_window(drawn, plain, window, rank, None)
            rounded = _rounded(drawn, plain, window, codec)
            expected = _expected(drawn, plain, window)
            run_window(drawn, module, window, rank, harness)
            found = grads(module)
            # What is weighted in a module of several types is divided in single precision.
            least = 1e-6 if drawn.weighted else 0.0
            tolerance = {dtype: max(most, least) for dtype, most in RELATIVE.items()}
            _compare(found, expected, f"window {window}", tolerance, rounded)
            bits += [g is not None and as_bytes(g) for g in found.values()]
            for name, p in plain.named_parameters():  # the next window begins alike
                mean = expected[name]
                p.grad = None if mean is None else mean.clone()
        harness.reducer.settle()
    digest = hashlib.sha256(repr(bits).encode()).digest()
    everyone = [None] * drawn.world_size
    dist.all_gather_object(everyone, digest)
    assert len(set(everyone)) == 1, "the ranks' gradients are not the same bits"


def _equal_or_all_fail(drawn: Draw, rank: int, codec: Codec | None) -> str:
    """A draw in which ranks differ in what they train: what they are told ends all of them."""
    group = ReplicaGroup.create(
        torch.device("cpu"), PATIENCE, host_reads_are_free=not drawn.deferred
    )
    told: str | None = None
    try:
        run_draw(drawn, rank, group, codec)
    except (ReplicaMismatchError, RuntimeError) as error:  # by name, or as a wait that timed out
        told = repr(error)
    everyone: list[str | None] = [None] * drawn.world_size
    dist.all_gather_object(everyone, told)
    assert all(everyone) or not any(everyone), f"only some ranks were told: {everyone}"
    return "equal" if told is None else "error"


def run_seeds(
    rank: int, world_size: int, seeds: Iterable[int], wire: str | None = None
) -> dict[str, int]:
    """Run these draws on this rank; return how many ended how. Collective: every rank.

    ``wire`` sends all of them rounded, ``"bf16"`` or ``"int8"``, and allows for that.
    """
    codec = {None: None, "bf16": Half(torch.bfloat16), "int8": Int8(16)}[wire]
    warnings.simplefilter("ignore")  # torch's, about checkpoints whose input needs no gradient
    torch.set_num_threads(1)
    groups = {
        deferred: ReplicaGroup.create(torch.device("cpu"), host_reads_are_free=not deferred)
        for deferred in (False, True)
    }
    ended = {"equal": 0, "error": 0}
    for seed in seeds:
        drawn = draw(seed, world_size)
        try:
            if drawn.frozen_on is not None:
                ended[_equal_or_all_fail(drawn, rank, codec)] += 1
            else:
                run_draw(drawn, rank, groups[drawn.deferred], codec)
                ended["equal"] += 1
        except BaseException as error:
            raise AssertionError(
                f"draw with seed {seed} at world size {world_size}: {error}"
            ) from error
    return ended


def main() -> None:
    """Run many draws, in portions: a portion's ranks are forked anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--wire", choices=["bf16", "int8"])
    args = parser.parse_args()
    portion, begun = 100, time.monotonic()
    for number in range(math.ceil(args.draws / portion)):
        first = args.first + number * portion
        seeds = range(first, min(first + portion, args.first + args.draws))
        ended = run_ranks(run_seeds, args.world_size, seeds, args.wire, timeout_s=900)[0]
        print(f"seeds {seeds.start} to {seeds.stop - 1}: {ended}", flush=True)
    print(f"{args.draws} draws in {time.monotonic() - begun:.0f} s: all right")


if __name__ == "__main__":
    main()
