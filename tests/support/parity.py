"""Gradients against a plain-torch reference: the mean of the ranks' local gradients, ``None`` included.

``check`` runs a scenario twice on each rank: on a copy without any engine, whose local gradients are
then averaged with plain collectives, and on the module that the reducer is attached to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.codec import Half, Int8
from lightning_dp.engine.wires.shard import ShardWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.engine.wires.wire import Wire
from tests.support.spies import RecordingWire

# How gradients travel: one of ``CONNECT``; set by the fixture ``each_wire``.
WIRE = "group"
CONNECT: dict[str, Callable[[ReplicaGroup], Wire | None]] = {
    "group": AllReduceWire,
    "shared_memory": SharedMemoryWire.connect,
    "shard": ShardWire.connect,
    "bf16": partial(ShardWire.connect, codec=Half(torch.bfloat16)),
    "int8": partial(ShardWire.connect, codec=Int8()),
}
EXACT = ("group", "shared_memory", "shard")
# Small caps, so that a test's small module has several buckets.
SMALL = LayoutOptions(cap_bytes=2048, first_bytes=512, last_bytes=512)


# Whether reads come one step late, as on an accelerator; set by the fixture ``each_reading``.
DEFERRED = False


def make_group() -> ReplicaGroup:
    """A group over all ranks on the test's ground, whose host reads at once or a step later."""
    return ReplicaGroup.create(
        torch.get_default_device(), host_reads_are_free=False if DEFERRED else None
    )


def make_wire(group: ReplicaGroup) -> Wire:
    """The wire that the test asks for."""
    if group.world_size == 1:
        return AllReduceWire(group)
    wire = CONNECT[WIRE](group)
    assert wire is not None
    return wire


class Harness:
    """A module with a reducer on one rank."""

    def __init__(
        self,
        module: nn.Module,
        *,
        options: LayoutOptions = SMALL,
        wire: Callable[[ReplicaGroup], Wire] | None = None,
        with_keeper: bool | str = False,
        group: ReplicaGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self.module = module
        self.group = group or make_group()
        self.window = AccumulationWindow()
        if with_keeper:
            mode = with_keeper if isinstance(with_keeper, str) else "lazy"
            kwargs["keeper"] = BufferKeeper(module, self.group, mode)
        self.keeper: BufferKeeper | None = kwargs.get("keeper")
        self.recording = RecordingWire((wire or make_wire)(self.group))
        self.reducer = Reducer(module, self.group, self.window, self.recording, options, **kwargs)

    def before_step(self) -> None:
        """What the strategy does before a window's first forward."""
        if self.keeper is not None:
            self.keeper.before_step()
        self.reducer.release_storage()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As the strategy does it."""
        self.reducer.arm(loss)
        try:
            loss.backward(**kwargs)
        except BaseException as error:
            self.reducer.abort(error)
            raise
        if not self.reducer.nested:
            self.reducer.finalize()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.reducer.close()


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return the same module on every rank."""
    torch.manual_seed(seed)
    return make()


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a dense copy of each gradient, by name."""
    found = {}
    for name, p in module.named_parameters():
        g = p.grad
        found[name] = None if g is None else (g.to_dense() if g.is_sparse else g).detach().clone()
    return found


def mean_over_ranks(local: dict[str, Tensor | None], module: nn.Module) -> dict[str, Tensor | None]:
    """Average local gradients with plain collectives, one a dtype; used nowhere stays ``None``."""
    parameters = dict(module.named_parameters())
    used = torch.tensor([float(local[name] is not None) for name in parameters] or [0.0])
    dist.all_reduce(used)
    sums: dict[str, Tensor] = {}
    for name, p in parameters.items():
        grad = local[name]
        total = torch.zeros_like(p, dtype=_wide(p.dtype)).contiguous()
        sums[name] = total if grad is None else total.copy_(grad)
    for dtype in dict.fromkeys(total.dtype for total in sums.values()):
        names = [name for name, total in sums.items() if total.dtype == dtype]
        flat = torch.cat([sums[name].reshape(-1) for name in names])
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
        parts = flat.split([sums[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            sums[name] = part.view(sums[name].shape)
    return {
        name: None if users == 0 else (sums[name] / dist.get_world_size()).to(p.dtype)
        for (name, p), users in zip(parameters.items(), used.tolist(), strict=True)
    }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# What a wire may round away of gradients of fp32, as a share of the largest number of a bucket.
ROUNDING = {"bf16": 1e-2, "int8": 2e-2}
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def assert_same(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Compare by name, ``None`` included."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        if want is None or got is None:
            assert got is want, f"{name}: got {'None' if got is None else 'a gradient'}"
            continue
        rounded = ROUNDING.get(WIRE, 0.0) if want.dtype in (torch.float32, torch.complex64) else 0.0
        tolerance = max(TOLERANCE[want.dtype], rounded)
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def as_bytes(tensor: Tensor) -> bytes:
    """The elements' bytes in logical order, whatever the strides."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
    flat.view(values.shape).copy_(values)
    return flat.view(torch.uint8).cpu().numpy().tobytes()


def assert_equal_on_all_ranks(tensors: dict[str, Tensor | None]) -> None:
    """Every rank holds the same bytes."""
    mine = {
        name: None if t is None else as_bytes(t)
        for name, t in tensors.items()
        if t is None or not t.is_sparse
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        for name in mine:
            assert other[name] == everyone[0][name], f"{name} differs between rank 0 and {rank}"


def plain_backward(loss: Tensor, **kwargs: Any) -> None:
    """A backward without any engine."""
    loss.backward(**kwargs)


def check(
    rank: int,
    world_size: int,
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Callable[..., None], int, int], None],
    steps: int = 4,
    lr: float = 0.1,
    raw: bool = False,
    **options: Any,
) -> list[list[tuple[int, tuple[str, ...], int]]]:
    """Run ``step(module, backward, step_index, rank)`` both ways and compare; return launches by step.

    ``raw``: the step calls ``loss.backward()``, as a user may; what is still open then is finished as
    before an optimizer's step.
    """
    module = seeded(make)
    plain = copy.deepcopy(module)
    launches = []
    with Harness(module, **options) as harness:
        for index in range(steps):
            for m in (module, plain):
                m.zero_grad()
            torch.manual_seed(1000 * index + rank)
            step(plain, plain_backward, index, rank)
            expected = mean_over_ranks(grads(plain), plain)
            torch.manual_seed(1000 * index + rank)
            harness.recording.launches.clear()
            harness.before_step()
            if raw:
                step(module, plain_backward, index, rank)
                harness.reducer.finalize()
            else:
                step(module, harness.backward, index, rank)
            launches.append(list(harness.recording.launches))
            actual = grads(module)
            assert_same(actual, expected)
            assert_equal_on_all_ranks(actual)
            with torch.no_grad():
                for (_, p), (_, q) in zip(
                    module.named_parameters(), plain.named_parameters(), strict=True
                ):
                    if p.grad is not None and lr:
                        g = p.grad.to_dense() if p.grad.is_sparse else p.grad
                        p.sub_(lr * g)
                        q.copy_(p)
    return launches
