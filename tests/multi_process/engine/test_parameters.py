"""Parameters in every state: tied, large, sparse, complex, of any dtype and strides, ignored, refused."""

from __future__ import annotations

import copy
import time
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.plan.registry import is_on
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.engine.replicas.packing import plain_parts
from lightning_dp.errors import ConfigError, ReplicaMismatchError
from lightning_dp.step.optimizer_groups import OptimizerGroups
from tests.support import grounds
from tests.support.nets import data
from tests.support.parity import (
    SMALL,
    Harness,
    as_bytes,
    assert_equal_on_all_ranks,
    assert_same,
    check,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("each_wire")]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)).tanh())


def _tied(rank, world_size):
    def step(module, backward, index, rank):
        backward(module(torch.randint(20, (4, 3))).square().mean())

    check(rank, world_size, lambda: Tied().double(), step)


@both_worlds
def test_tied_weights_fire_once_with_the_whole_sum(world_size):
    run_ranks(_tied, world_size)


def _large(rank, world_size):
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 200), nn.Linear(200, 8)).double()

    launches = check(rank, world_size, make, lambda m, b, i, r: b(m(data()).square().mean()))
    sent = {name: (names, size) for step in launches for _, names, size in step for name in names}
    for name in ("1.weight", "2.weight"):
        names, size = sent[name]
        assert size > SMALL.cap_bytes
        assert all(other.endswith("bias") for other in names if other != name), names


@both_worlds
def test_a_parameter_larger_than_a_bucket_travels_without_another(world_size):
    run_ranks(_large, world_size)


class Mixed(nn.Module):
    """Every floating dtype in one graph, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.double_ = nn.Linear(8, 8).double()
        self.single_ = nn.Linear(8, 8)
        self.bfloat_ = nn.Linear(8, 8).bfloat16()
        self.half_ = nn.Linear(8, 8).half()
        self.complex_ = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.whole = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x):
        x = self.double_(x).tanh()
        x = self.single_(x.float()).tanh() * self.scale
        x = self.bfloat_(x.bfloat16()).tanh()
        x = self.half_(x.half()).tanh().float()
        x = (x.to(torch.complex64) @ self.complex_).abs()
        return (x + self.whole).float().square().mean() + self.empty.sum()


def _mixed(rank, world_size, options):
    check(rank, world_size, Mixed, lambda m, b, i, r: b(m(data())), options=options)


@both_worlds
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_all_dtypes_in_one_module(world_size, reduce_dtype):
    options = LayoutOptions(2048, 512, 512, reduce_dtype)
    run_ranks(_mixed, world_size, options)


class Strides(nn.Module):
    def __init__(self):
        super().__init__()
        make = torch.randn
        self.transposed = nn.Parameter(make(8, 6, dtype=torch.float64).t())
        self.gaps = nn.Parameter(make(8, 12, dtype=torch.float64)[:, ::2])
        self.expanded = nn.Parameter(make(1, 6, dtype=torch.float64).expand(8, 6))
        self.permuted = nn.Parameter(make(2, 8, 3, dtype=torch.float64).permute(2, 0, 1))
        self.last = nn.Conv3d(2, 4, 1).double().to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        y = x @ self.transposed + x @ self.gaps.t() + x @ self.expanded.t()
        z = torch.einsum("ni,abi->nab", y, self.permuted)
        return self.last(z[:, :2, :2, None, None]).square().mean() + z.sum()


def _strides(rank, world_size):
    def step(module, backward, index, rank):
        backward(module(data(3, 6)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(rank, world_size, Strides, step, lr=0.0)
    module = seeded(Strides)
    with Harness(module) as harness:
        step(module, harness.backward, 0, rank)
        for name in ("transposed", "permuted"):
            p = getattr(module, name)
            assert p.grad.stride() == p.stride(), name


@both_worlds
def test_any_strides_without_a_warning(world_size):
    run_ranks(_strides, world_size)


def _ignored(rank, world_size):
    module = seeded(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    )
    module._ddp_params_and_buffers_to_ignore = ["0.weight", "module.0.bias", "2.running_mean"]
    with torch.no_grad():
        module[0].weight.mul_(rank + 1)  # may differ: nobody looks at it
        module[2].running_mean.add_(rank)
    plain = copy.deepcopy(module)
    with Harness(module, with_keeper=True) as harness:
        replicas.synchronize(module, harness.group)
        x = data()
        harness.backward(module(x).square().mean())
        plain(x).square().mean().backward()
        harness.keeper.before_use()
    local, mean, found = grads(plain), mean_over_ranks(grads(plain), plain), grads(module)
    ignored = {"0.weight", "0.bias"}
    assert_same(found, {name: local[name] if name in ignored else mean[name] for name in mean})
    return as_bytes(module[2].running_mean), as_bytes(module[2].running_var)


@both_worlds
def test_ignored_parameters_and_buffers_are_left_alone(world_size):
    means, variances = zip(*run_ranks(_ignored, world_size), strict=True)
    assert len(set(means)) == world_size
    assert len(set(variances)) == 1


def _refused(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    meta = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    sharded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh(grounds.CURRENT.device_type, (world_size,))
    sharded[1].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    group = ReplicaGroup.create(torch.get_default_device())
    for module, what in ((lazy, "lazy"), (meta, "meta"), (sharded, "DTensor")):
        with pytest.raises(ConfigError, match=what) as caught:
            replicas.synchronize(module, group)
        assert "1.weight" in str(caught.value)
        with pytest.raises(ConfigError, match=what):
            Harness(module)
        module._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
        replicas.synchronize(module, group)
        Harness(module).reducer.close()


def test_lazy_meta_and_sharded_parameters_are_refused_by_name():
    run_ranks(_refused, 2)


def _inference(rank, world_size):
    with torch.inference_mode():
        frozen = nn.Linear(8, 8).double().requires_grad_(False)
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8).double(), nn.Linear(8, 8).double()))
    module.frozen = frozen
    with torch.inference_mode():
        module.frozen.weight.fill_(rank)
        module.register_buffer("table", torch.full((3,), float(rank)))
    with Harness(module, with_keeper=True) as harness:
        replicas.synchronize(module, harness.group)
        for _ in range(2):
            harness.before_step()
            harness.backward(module[1](module[0](data())).sum())
        harness.keeper.before_use()
    assert_equal_on_all_ranks(module.state_dict())


@both_worlds
def test_parameters_made_in_inference_mode(world_size):
    run_ranks(_inference, world_size)


class Opaque(torch.Tensor):
    """Stored as int8 codes and a scale; knows hardly any operation, and tells nobody what it is made of."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float64)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return type(args[0])(args[0].codes, args[0].scale)
        raise TypeError(f"does not know {func}")


class Codes(Opaque):
    """One that says it, as those of quantised models do."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


class Named(torch.Tensor):
    """A subclass with an ordinary memory, as torch's own examples make them."""


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.half, torch.bfloat16,
    torch.float, torch.double, torch.complex64, torch.complex128,
]  # fmt: skip


def as_stored(rank):
    """One tensor of every kind, with other values on each rank."""
    ones = {str(t): (torch.ones(2, 3) * (rank == 0)).to(t) for t in DTYPES}
    value = torch.full((4, 3), float(rank))
    codes = torch.full((4, 3), rank, dtype=torch.int8)
    return {
        **ones,
        "transposed": value.t(),
        "expanded": value[:1].expand(4, 3),
        "conjugate": torch.view_as_complex(torch.full((3, 2), float(rank))).conj(),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(rank),
        "subclass": value.as_subclass(Named),
        "codes": Codes(codes, torch.full((), float(rank))),
        "sparse": value.fill_diagonal_(1.0).to_sparse(),
        "quantised": torch.quantize_per_tensor(value, 0.5, 0, torch.qint8),
        "opaque": Opaque(codes.clone(), torch.full((), float(rank))),
    }


ALONE = {"sparse", "quantised", "opaque"}


def _every_kind(rank, world_size, as_parameter):
    module, mine = nn.Module(), as_stored(rank)
    for name, tensor in mine.items():
        key = name.replace(".", "_")
        if as_parameter:
            setattr(module, key, nn.Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(key, tensor)
    left_alone = replicas.synchronize(module, ReplicaGroup.create(torch.get_default_device()))
    assert left_alone == ALONE
    wanted = as_stored(0)
    for name in mine.keys() - ALONE:
        found = getattr(module, name.replace(".", "_"))
        for part, want in zip(plain_parts(found), plain_parts(wanted[name]), strict=True):
            assert as_bytes(part.resolve_conj()) == as_bytes(want.resolve_conj()), name
    kept = {name: mine[name] for name in ("sparse", "quantised")}
    return {
        name: (t.to_dense() if t.is_sparse else t.dequantize()).sum().item()
        for name, t in kept.items()
    }


@both_worlds
@pytest.mark.parametrize("as_parameter", [True, False], ids=["parameters", "buffers"])
def test_every_kind_of_tensor_is_sent_or_left_alone_by_name(world_size, as_parameter):
    found = run_ranks(_every_kind, world_size, as_parameter)
    assert found[0] != found[1], "control: what is left alone differs"


def _stored_otherwise(rank, world_size):
    module = nn.Module()
    codes = torch.zeros(2, dtype=torch.int8 if rank == 0 else torch.int16)
    module.base = nn.Parameter(Codes(codes, torch.ones(())), requires_grad=False)
    with pytest.raises(ReplicaMismatchError, match=r"base.*stored_as.*int8.*int16"):
        replicas.synchronize(module, ReplicaGroup.create(torch.get_default_device()))


def test_a_subclass_that_is_stored_otherwise_on_a_rank_is_named():
    run_ranks(_stored_otherwise, 2)


def _setup_cost(rank, world_size):
    group = ReplicaGroup.create(torch.get_default_device())
    seconds = {}
    for size in (400, 3200):
        module = nn.ParameterList(
            torch.ones(2, dtype=(t, torch.half)[i % 2]) for i in range(size) for t in [torch.float]
        )
        times = []
        for _ in range(3):
            begin = time.process_time()
            with CollectiveSpy() as spy:
                replicas.synchronize(module, group)
            times.append(time.process_time() - begin)
            assert dict(spy.calls) == {"all_gather": 2, "broadcast": 1}
        seconds[size] = min(times)
    assert seconds[3200] < 24 * seconds[400], seconds  # 8 times as many; 64 would be quadratic


def test_replicas_of_any_number_of_parameters_take_one_exchange_and_one_broadcast():
    run_ranks(_setup_cost, 2)


class Counted(list):
    looks = 0

    def __iter__(self):
        Counted.looks += 1
        return super().__iter__()


@pytest.mark.cpu_only("starts no rank")
def test_the_optimizer_of_a_parameter_is_looked_up():
    first, second = [nn.ParameterList(torch.ones(2) for _ in range(50)) for _ in range(2)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"] = Counted(optimizer.param_groups[0]["params"])
    Counted.looks = 0
    groups = OptimizerGroups(optimizers)
    assert {groups.partition(p) for p in first.parameters()} == {0}
    assert {groups.partition(p) for p in second.parameters()} == {1}
    late = nn.Parameter(torch.ones(3))
    assert groups.partition(late) == 2
    assert Counted.looks == 2
    optimizers[1].add_param_group({"params": [late]})
    assert groups.have_grown()
    assert groups.partition(late) == 1
    assert not groups.have_grown()


@pytest.mark.cpu_only("starts no rank")
def test_devices_are_compared_with_their_number():
    assert is_on(torch.ones(1), torch.device("cpu"))
    first = torch.ones(1, device="meta")
    assert is_on(first, torch.device("meta"))
    other = mock.Mock(device=torch.device("cuda", 1))
    assert is_on(other, torch.device("cuda"))
    assert is_on(other, torch.device("cuda", 1))
    assert not is_on(other, torch.device("cuda", 0))
    assert not is_on(other, torch.device("xpu", 1))


def _copied(rank, world_size):
    """copy.deepcopy and pickle of a module (weight averaging, checkpoints) take no hook along."""
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double())
    with Harness(module) as harness:
        twin = copy.deepcopy(module)
        assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())
        with CollectiveSpy().expecting():
            twin(data()).sum().backward()
        harness.backward(module(data()).sum())
        assert_equal_on_all_ranks(grads(module))
        assert set(module.state_dict()) == set(twin.state_dict())
        assert not any(vars(p) for p in module.parameters()), "nothing is stored on a parameter"


def test_a_copy_of_the_module_has_no_hooks():
    run_ranks(_copied, 2)
