"""Low-precision gradients: the type on the wire, loss scalers, checks for what is not finite."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.errors import NonFiniteGradientError
from tests.support import grounds
from tests.support.modules import Base
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    check,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks
from tests.support.trainers import fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("each_wire")]


class Mixed(nn.Module):
    """Two dtypes, and a layer that only some ranks use."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.low = nn.Linear(8, 8).to(dtype)
        self.maybe = nn.Linear(8, 8).to(dtype)
        self.dead = nn.Linear(8, 8).to(dtype)
        self.single = nn.Linear(8, 8)
        self.double_ = nn.Linear(8, 8).double()
        self.phase = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x, use):
        low = self.low(x.to(self.low.weight.dtype)).tanh()
        low = self.maybe(low) if use else low
        x = self.double_(self.single(low.float()).double())
        return (x.to(torch.complex64) @ self.phase).abs().square().mean()


def options(dtype):
    return LayoutOptions(2048, 512, 512, dtype)


def _exact(rank, world_size, dtype, create_graph):
    """Averaged in fp32 and rounded once: what the reference does."""

    def step(module, backward, index, rank):
        use = index % 2 == 0 or rank == 0
        backward(module(torch.randn(4, 8), use), create_graph=create_graph)
        for p in module.parameters():
            p.grad = None if p.grad is None else p.grad.detach()

    module = seeded(lambda: Mixed(dtype))
    plain = copy.deepcopy(module)
    with Harness(module, options=options(torch.float32)) as harness:
        for index in range(4):
            for m, backward in ((module, harness.backward), (plain, torch.autograd.backward)):
                m.zero_grad()
                torch.manual_seed(10 * index + rank)
                step(m, lambda loss, b=backward, **kw: b(loss, **kw), index, rank)
            expected = mean_over_ranks(grads(plain), plain)
            for name, value in grads(module).items():
                want = expected[name]
                assert (value is None) == (want is None), name
                if value is None:
                    continue
                assert value.dtype == want.dtype
                # fp32 sums of two are exact in any order; at three the last bit of fp32 may differ
                tolerance = 0 if name.startswith(("low", "maybe")) and world_size == 2 else 1e-6
                if value.dtype in (torch.bfloat16, torch.float16):
                    tolerance = max(
                        tolerance, 0 if world_size == 2 else torch.finfo(value.dtype).eps
                    )
                torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance, msg=name)
        buckets = harness.reducer.layout.buckets
        assert {b.dtype for b in buckets} == {torch.float32, torch.float64}
        # nothing of these buckets is a gradient: their memory goes back at once
        assert all(b.flat is None for b in buckets if not any(b.same_dtype))


@both_worlds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("create_graph", [False, True])
def test_low_precision_parameters_reduced_in_fp32(world_size, dtype, create_graph):
    run_ranks(_exact, world_size, dtype, create_graph)


def _bf16(rank, world_size):
    def step(module, backward, index, rank):
        backward(module(torch.randn(4, 8), index % 2 == 0 or rank == 0))

    module = seeded(Mixed)
    plain = copy.deepcopy(module)
    with Harness(module, options=options(torch.bfloat16)) as harness:
        for index in range(4):
            module.zero_grad(), plain.zero_grad()
            torch.manual_seed(10 * index + rank)
            step(module, harness.backward, index, rank)
            torch.manual_seed(10 * index + rank)
            step(plain, lambda loss: loss.backward(), index, rank)
            found, expected = grads(module), mean_over_ranks(grads(plain), plain)
            assert_equal_on_all_ranks(found)
            for name, want in expected.items():
                assert (found[name] is None) == (want is None)
                if want is not None:
                    tolerance = 1e-12 if want.dtype == torch.float64 else 3e-2
                    torch.testing.assert_close(found[name], want, rtol=tolerance, atol=tolerance)
        assert {b.dtype for b in harness.reducer.layout.buckets} == {torch.bfloat16, torch.float64}
        totals = harness.reducer.totals
    assert totals.weight == world_size, "weights travel in fp32 or more"


@both_worlds
def test_gradients_averaged_in_bf16_but_doubles_are_not(world_size):
    run_ranks(_bf16, world_size)


def _half_sum(rank, world_size):
    """Gradients whose sum over ranks does not fit in half precision, and whose mean does."""
    module = nn.Linear(2, 2, bias=False).half()
    with Harness(module) as harness:
        for _ in range(2):
            module.zero_grad()
            harness.backward(module(torch.full((1, 2), 50_000.0).half()).sum())
            assert torch.isfinite(module.weight.grad).all()
            torch.testing.assert_close(
                module.weight.grad.float(), torch.full((2, 2), 50_000.0), rtol=1e-3, atol=0
            )


@both_worlds
def test_half_precision_sums_do_not_overflow(world_size):
    run_ranks(_half_sum, world_size)


class CPUScaler(MixedPrecision):
    """``16-mixed`` with a scaler that works on a CPU too."""

    def __init__(self, scale):
        super().__init__("bf16-mixed", grounds.CURRENT.device_type)
        self.scaler = torch.amp.GradScaler(
            grounds.CURRENT.device_type, init_scale=scale, growth_interval=1000
        )
        self.precision = "16-mixed"


class Spoilt(Base):
    """A gradient that is not finite, in step 1 on rank 1."""

    def __init__(self):
        super().__init__()
        self.float()
        self.scales = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch.float())
        spoil = batch_idx == 1 and self.trainer.global_rank == 1
        return loss * float("inf") if spoil else loss

    def on_train_batch_end(self, *_):
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else None)


def _scaler(rank, world_size, port, scale):
    module = Spoilt()
    plugins = [CPUScaler(scale)] if scale else []
    try:
        fit(module, rank, world_size, port, lean(check_gradients="raise"), plugins=plugins)
    except NonFiniteGradientError as error:
        return error.ranks, len(error.names) > 0
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    assert all(torch.isfinite(p).all() for p in module.parameters())
    return module.scales


def test_check_gradients_with_a_loss_scaler_reports_what_the_scaler_is_not_to_blame_for():
    assert ranks(_scaler, 2, 64.0) == [[64.0, 32.0, 32.0, 32.0]] * 2, "skipped alike, not reported"
    assert ranks(_scaler, 2, 0.5) == [((1,), True)] * 2
    assert ranks(_scaler, 2, None) == [((1,), True)] * 2


def _control(rank, world_size):
    """Sums of bfloat16 in bfloat16 are another number than those in fp32."""
    x = torch.full((1,), 256.0).bfloat16() if rank == 0 else torch.full((1,), 1.0).bfloat16()
    low = x.clone()
    dist.all_reduce(low)
    wide = x.float()
    dist.all_reduce(wide)
    return low.item() != wide.item()


def test_control_bf16_sums_lose_digits():
    assert all(run_ranks(_control, 2))


def _several(rank, world_size):
    check(rank, world_size, Mixed, lambda m, b, i, r: b(m(torch.randn(4, 8), i != 1 or r == 0)))


@both_worlds
def test_each_dtype_in_its_own_by_default(world_size):
    run_ranks(_several, world_size)
