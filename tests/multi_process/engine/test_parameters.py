"""Parameters in every state: tied, large, sparse, complex, of any dtype and strides, ignored, refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.errors import ConfigError
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
    mesh = init_device_mesh("cpu", (world_size,))
    sharded[1].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    group = ReplicaGroup.create(torch.device("cpu"))
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
