"""Z1, Z2, Z11, Z12: a step in shares against the whole step, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Slicing, Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.shard import ShardWire
from lightning_dp.optim.gather import ParameterGather
from lightning_dp.optim.kinds import Sharding, judge, of_parameter
from lightning_dp.optim.sharded import ShardedOptimizer
from lightning_dp.optim.shares import Shares
from lightning_dp.optim.state import state_bytes
from tests.support.parity import Harness, as_bytes, assert_equal_on_all_ranks, make_group, seeded
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]

CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {"weight_decay": 0.01},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "ASGD": {"t0": 2},
}
WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
WHOLE_TENSORS: dict[str, dict[str, Any]] = {"Adafactor": {}, "Muon": {}}


class Net(nn.Module):
    """Odd sizes, a channels_last convolution, a scalar, a weight nobody uses, one that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(7)
        self.body = nn.Sequential(nn.Linear(7 * 16, 53), nn.Tanh(), nn.Linear(53, 31))
        self.head = nn.Linear(31, 5)
        self.gain = nn.Parameter(torch.ones(()))
        self.dead, self.maybe = nn.Linear(9, 9), nn.Linear(31, 31)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.body(self.norm(self.conv(x)).flatten(1)).tanh()
        return self.head(self.maybe(x) if use else x) * self.gain


class Matrices(nn.Module):
    """Matrices only, for optimizers that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(5))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def shards(
    harness: Harness, optimizers: list[Optimizer], *, masters: bool = False
) -> list[ShardedOptimizer]:
    """Put each optimizer's state in shares."""
    kinds = {
        id(p): sharding
        for each, sharding in [(each, judge(each, masters=masters).sharding) for each in optimizers]
        for group in each.param_groups
        for p in group["params"]
    }

    def sharding_of(slot: Slot) -> Sharding:
        return of_parameter(kinds.get(id(slot.param), Sharding.REPLICATED), slot.param)

    for slot in harness.reducer.registry.slots:
        slot.sliced = sharding_of(slot) is Sharding.SLICES and not slot.expects_sparse
    group = harness.group
    shares = Shares(harness.reducer.layout, group.rank, group.world_size, sharding_of)
    gather = ParameterGather(shares, group)
    return [
        ShardedOptimizer(each, n, shares, gather, group, masters=masters)
        for n, each in enumerate(optimizers)
    ]


def batches(module: nn.Module, rank: int, steps: int) -> Iterator[tuple[Tensor, bool]]:
    shape = (4, 3, 4, 4) if isinstance(module, Net) else (4, 16)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        yield torch.randn(shape), step in (2, 3)


def train(
    module: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    group: ReplicaGroup,
    *,
    zero: bool,
    steps: int = 5,
    cap: int = 4096,
    late: bool = True,
    gathers: bool | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Return parameters, the whole state dict on rank 0, and the bytes of state on this rank.

    ``gathers``: over the wire in two halves, of which the second one runs or not.
    """
    optimizer = make(module)
    options = LayoutOptions(
        cap_bytes=cap, first_bytes=1024, last_bytes=1024, slicing=Slicing(group.world_size)
    )
    wire = None if gathers is None else lambda g: ShardWire.connect(g, gathers=gathers)
    with Harness(module, options=options, group=group, wire=wire) as harness:
        sharded = shards(harness, [optimizer])
        if not zero:  # the same buckets: three ranks add in an order that follows from them
            sharded.pop().close()
        for x, use in batches(module, group.rank, steps):
            optimizer.zero_grad()
            loss = module(x, use and late).square().mean()
            harness.before_step()
            harness.backward(loss)
            optimizer.step()
        if sharded:
            held = state_bytes(sharded[0].optimizer)
            whole = sharded[0].state_dict(group)
            sharded[0].close()
        else:
            whole = optimizer.state_dict()
            held = sum(
                v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
            )
        return dict(module.named_parameters()), copy.deepcopy(whole), held


def assert_same_bytes(actual: Any, expected: Any, where: str) -> None:
    """Compare nested containers of tensors and numbers, also the order of keys that are names."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.shape == expected.shape, where
        assert actual.stride() == expected.stride(), where
        assert as_bytes(actual) == as_bytes(expected), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        if all(
            isinstance(key, str) for key in expected
        ):  # parameters' numbers: when each was used first
            assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same_bytes(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, value in enumerate(expected):
            assert_same_bytes(actual[number], value, f"{where}[{number}]")
    else:
        assert actual == expected, where


def makers() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[nn.Module], Optimizer]]]:
    for name, settings in CLASSES.items():
        for way in WAYS:

            def make(m: nn.Module, n: str = name, s: Any = settings, w: Any = way) -> Optimizer:
                return getattr(torch.optim, n)(m.parameters(), **{"lr": 0.01, **s, **w})

            try:
                make(nn.Linear(1, 1))
            except (TypeError, RuntimeError):
                continue  # no such way of this class
            yield f"{name} {way}", Net, make
    for name, settings in WHOLE_TENSORS.items():

        def whole(m: nn.Module, n: str = name, s: Any = settings) -> Optimizer:
            return getattr(torch.optim, n)(m.parameters(), lr=0.01, **s)

        yield name, Matrices if name == "Muon" else Net, whole


def _bits(rank: int, world_size: int) -> int:
    count = 0
    group = make_group()
    for name, net, make in makers():
        module = seeded(net)
        twin = copy.deepcopy(module)
        # torch's fused SGD fails, with or without shares, when a parameter gets its first gradient late.
        late = name != "SGD {'fused': True}"
        parameters, state, held = train(module, make, group, zero=True, late=late)
        expected, plain, all_of_it = train(twin, make, group, zero=False, late=late)
        for key, value in expected.items():
            assert as_bytes(parameters[key]) == as_bytes(value), f"{name}: {key}"
        assert_equal_on_all_ranks(parameters)
        if rank == 0:
            assert_same_bytes(state, plain, name)
        if name.split()[0] in CLASSES:
            # Counters of parameters, and what the state's buckets are padded with.
            assert held <= 1.02 * all_of_it / world_size + 1024, (name, held, all_of_it)
        count += 1
    return count


def _bits_in_two_halves(rank: int, world_size: int) -> None:
    group = make_group()
    names = (
        "AdamW {'fused': True}",
        "Adagrad {'foreach': True}",
        "SGD {'foreach': False}",
        "Adafactor",
    )
    for name, net, make in makers():
        if name not in names:
            continue
        module = seeded(net)
        twin = copy.deepcopy(module)
        parameters, state, _ = train(module, make, group, zero=True, gathers=False)
        expected, plain, _ = train(twin, make, group, zero=False, gathers=True)
        assert_same_bytes(parameters, expected, name)
        assert_equal_on_all_ranks(parameters)
        if rank == 0:
            assert_same_bytes(state, plain, name)


@both_worlds
def test_z1_the_second_half_carries_parameters_in_place_of_gradients(world_size):
    run_ranks(_bits_in_two_halves, world_size, timeout_s=120)


@both_worlds
def test_z1_z2_every_class_of_torch_is_equal_to_the_bit_and_holds_its_share(world_size):
    assert run_ranks(_bits, world_size, timeout_s=240)[0] > 25
