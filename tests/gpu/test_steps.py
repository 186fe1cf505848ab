"""Whole steps on one GPU, with their reduction forced, against plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.engine.plan.layout import LayoutOptions
from tests.support.cuda import forced, kernels
from tests.support.grounds import RunIf
from tests.support.nets import net
from tests.support.parity import assert_same, grads, seeded
from tests.support.ranks import run_ranks

pytestmark = [RunIf(min_cuda_gpus=1), pytest.mark.usefixtures("on_ground")]

OPTIMIZERS = {
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw single": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
}


def _optimizer(rank, world_size, which, scaled):
    module = seeded(lambda: net().float())
    plain = copy.deepcopy(module)
    steps = []
    with forced(module) as harness:
        for m, backward in ((module, harness.backward), (plain, torch.autograd.backward)):
            optimizer = OPTIMIZERS[which](m.parameters())
            scaler = torch.amp.GradScaler("cuda", init_scale=64.0, enabled=scaled)
            scales = []
            for index in range(8):
                torch.manual_seed(index)
                optimizer.zero_grad()
                loss = m(torch.randn(4, 8)).square().mean()
                loss = loss * (float("inf") if scaled and index == 5 else 1.0)
                backward(scaler.scale(loss))
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            steps.append(scales)
    assert steps[0] == steps[1]
    assert (steps[0][-1] == 32.0) == scaled, "one step was skipped"
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_optimizers_see_the_averages(which, scaled):
    run_ranks(_optimizer, 1, which, scaled)


def convolutions() -> nn.Module:
    layers = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def _channels_last(rank, world_size):
    module = seeded(convolutions)
    plain = copy.deepcopy(module)
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    with forced(module) as harness:
        for _ in range(3):
            module.zero_grad(), plain.zero_grad()
            plain(x).square().mean().backward()
            harness.backward(module(x).square().mean())
            assert_same(grads(module), grads(plain))
            for p in module.parameters():
                assert p.grad.stride() == p.stride()


def test_channels_last():
    run_ranks(_channels_last, 1)


def _compiled(rank, world_size):
    module = seeded(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]))
    plain = copy.deepcopy(module)
    compiled = torch.compile(module)
    with forced(module, options=LayoutOptions(40_000, 20_000, 20_000)) as harness:
        for index in range(4):
            torch.manual_seed(index)
            x = torch.randn(4, 64)
            module.zero_grad(), plain.zero_grad()
            plain(x).square().mean().backward()
            harness.backward(compiled(x).square().mean())
            assert_same(grads(module), grads(plain))
        assert len(harness.reducer.layout.buckets) > 3


@pytest.mark.timeout(600)
def test_torch_compile_with_its_own_kernels():
    run_ranks(_compiled, 1, timeout_s=500)


def wide() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])


def _memory(rank, world_size):
    module = seeded(wide)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    x = torch.randn(4, 2048)
    with forced(module) as harness:
        held = []
        for _ in range(6):
            module.zero_grad()
            harness.before_step()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            harness.backward(module(x).square().mean())
            torch.cuda.synchronize()
            held.append((torch.cuda.memory_allocated() - before) / size)
        twice = [p.grad.clone() for p in module.parameters()]
        control = (torch.cuda.memory_allocated() - before) / size
        del twice
    return held, control


def test_gradients_are_held_once():
    held, control = run_ranks(_memory, 1)[0]
    assert all(0.99 < each < 1.1 for each in held[1:]), held
    assert control > 1.9, "control: a second copy of them is seen"


def _kernels(rank, world_size):
    counts = {}
    x = torch.randn(4, 2048)
    module = seeded(wide)
    with forced(module) as harness:

        def ours():
            module.zero_grad()
            harness.before_step()
            harness.backward(module(x).square().mean())

        for _ in range(6):
            ours()
        counts["ours"] = kernels(ours)
    other = DistributedDataParallel(seeded(wide), device_ids=[0], gradient_as_bucket_view=True)

    def ddps():
        other.zero_grad()
        other(x).square().mean().backward()

    for _ in range(6):
        ddps()
    counts["ddp"] = kernels(ddps)
    plain = seeded(wide)
    counts["plain"] = kernels(lambda: plain(x).square().mean().backward())
    assert dist.get_backend() == "nccl"
    return counts


def test_kernels_of_a_step_beside_ddps():
    counts = run_ranks(_kernels, 1)[0]
    print(counts)
    assert counts["plain"] < counts["ours"] <= counts["ddp"] + 16, counts


def _addresses(rank, world_size):
    """Buckets of many small gradients keep their memory, which NCCL registers by its address."""
    module = seeded(lambda: net(16).float())
    addresses = []
    with forced(module) as harness:
        for _ in range(8):
            module.zero_grad()
            harness.before_step()
            harness.backward(module(torch.randn(4, 8)).square().mean())
            addresses.append([bucket.flat.data_ptr() for bucket in harness.reducer.layout.buckets])
    return addresses


def test_buckets_of_small_gradients_stay_where_they_are():
    addresses = run_ranks(_addresses, 1)[0]
    assert all(each == addresses[0] for each in addresses)
