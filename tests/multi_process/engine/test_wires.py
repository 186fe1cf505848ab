"""Rounded wires: their error, the same bits everywhere, what is never rounded. L1 to L5, by number.

``c`` is a codec's relative error for one tensor, ``nu`` the noise of a rank's gradient over the gradient's
own power. Then a mean over ``K`` ranks has the error ``c sqrt(1 + (1 + nu) / (K + nu))``, which tends to
``c``.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import nn

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.codec import Codec, Half, Int8, add_others, encode_others
from lightning_dp.engine.wires.shard import ShardWire
from tests.support import parity
from tests.support.nets import data, net
from tests.support.parity import (
    SMALL,
    Harness,
    as_bytes,
    assert_equal_on_all_ranks,
    grads,
    make_group,
    seeded,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multi_process

CODECS: dict[str, Codec] = {
    "bf16": Half(torch.bfloat16),
    "fp16": Half(torch.float16),
    "int8": Int8(),
}
NU = 2.0
N = 48 * 1024  # numbers; divisible by blocks of 256 for 2, 3, 4 and 64 ranks


def message(codec: Codec, rows: int, n: int) -> torch.Tensor:
    return torch.empty_like(codec.message(rows, n), device="cpu")


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    row, out = message(codec, 1, values.numel()), torch.empty_like(values)
    codec.encode(values.unsqueeze(0), row)
    codec.decode(row, out.unsqueeze(0))
    return out


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def gradient(rank: int) -> torch.Tensor:
    """The common gradient and this rank's own noise, fp32."""
    common = torch.randn(N, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(N, generator=torch.Generator().manual_seed(1 + rank))
    return common + math.sqrt(NU) * noise


def alone(codec: Codec) -> float:
    """``c``."""
    return relative(there_and_back(codec, gradient(0)), gradient(0))


def expected_error(codec: Codec, ranks: int, *, gathered: bool = True) -> float:
    """What a rank sends to itself is not rounded: of ``ranks`` terms one is exact."""
    rounded = (ranks - 1) / ranks
    return alone(codec) * math.sqrt(gathered + rounded * (1 + NU) / (ranks + NU))


def test_the_codecs_errors_and_bytes():
    for name, c, ratio in (("bf16", 1.65e-3, 0.5), ("fp16", 2.1e-4, 0.5), ("int8", 6.9e-3, 0.254)):
        codec = CODECS[name]
        assert alone(codec) == pytest.approx(c, rel=0.05)
        assert (
            codec.message(3, N).nbytes / (3 * N * 4)
            == codec.ratio
            == pytest.approx(ratio, abs=5e-4)
        )


def test_eight_bits_keep_the_ends_of_a_block_and_say_what_is_not_finite():
    codec = Int8(16)
    values = torch.zeros(16 * 6)
    values[0], values[1], values[2] = 127.0, -127.0, 0.6
    values[16], values[17] = 3e38, -1e30  # the ends of the range
    values[32] = 1e-40  # too small for a scale
    values[48], values[64], values[80] = float("inf"), float("nan"), -float("inf")
    back = there_and_back(codec, values)
    assert back[:3].tolist() == [127.0, -127.0, 1.0]
    assert back[16] == pytest.approx(3e38, rel=1e-6)
    assert not back[32:48].any(), "zero, and not by zero divided"
    assert back[48:].isnan().all(), "the whole block"
    assert not there_and_back(codec, torch.zeros(32)).any()


def _errors(rank, world_size):
    group = make_group()
    exact = torch.stack([gradient(other).double() for other in range(world_size)]).mean(0)
    found = {}
    for name, codec in CODECS.items():
        for gathers in (True, False):
            wire = ShardWire.connect(group, codec=codec, gathers=gathers)
            slot = Slot(0, "w", nn.Parameter(torch.zeros(N)))
            slot.sliced = True
            bucket = Bucket(0, [slot], torch.float32, torch.device("cpu"), wire.slicing)
            bucket.allocate()
            slot.view.copy_(gradient(rank) * wire.predivide_factor)
            wire.launch(bucket).wait()
            mine = slice(rank * bucket.slice_numel, (rank + 1) * bucket.slice_numel)
            part = mine if not gathers else slice(None)
            found[name, gathers] = relative(bucket.grads[part], exact[part])
            wire.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_L1_L5_the_error_is_that_of_the_formula_and_of_one_rounding_for_slices(world_size):
    for found in run_ranks(_errors, world_size):
        for (name, gathers), error in found.items():
            want = expected_error(CODECS[name], world_size, gathered=gathers)
            assert error == pytest.approx(want, rel=0.1), (name, gathers)


def simulated(codec: Codec, ranks: int) -> float:
    """The error of the wire's arithmetic with so many ranks, in this process, where rank 0 adds."""
    rows = message(codec, ranks, N)
    values = torch.stack([gradient(rank) for rank in range(ranks)]) / ranks
    exact = values.double().sum(0)
    encode_others(codec, values, rows, 0)
    total = values[0].clone()
    add_others(codec, rows, total, 0)
    return relative(there_and_back(codec, total), exact)


def ring(codec: Codec, ranks: int) -> float:
    """Control: each hop adds its own and rounds again."""
    exact = sum(gradient(rank).double() for rank in range(ranks)) / ranks
    total = torch.zeros(N)
    for rank in range(ranks):
        total = there_and_back(codec, total + gradient(rank) / ranks)
    return relative(total, exact)


@pytest.mark.parametrize("name", CODECS)
def test_L1_the_error_does_not_grow_with_the_number_of_ranks(name):
    codec, c = CODECS[name], alone(CODECS[name])
    for ranks in (2, 8, 64):
        assert simulated(codec, ranks) == pytest.approx(expected_error(codec, ranks), rel=0.1)
    assert simulated(codec, 64) < 1.1 * c
    assert ring(codec, 64) > c * math.sqrt(64 / 3), "control: a ring of rounded sums grows"


def _parity(rank, world_size):
    """Against plain torch, on every device and backend."""

    def step(module, backward, index, rank):
        backward(module(data(dtype=next(module.parameters()).dtype)).square().mean())

    for name in ("shard", "bf16", "int8"):
        parity.WIRE = name
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            parity.check(rank, world_size, lambda d=dtype: net().to(d), step)


@pytest.mark.usefixtures("ground")
def test_slices_average_as_an_all_reduce_does_on_every_device():
    run_ranks(_parity, 2)


class Uneven(nn.Module):
    """Tensors of one element and of several blocks; some are used by turns, one never."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Sequential(nn.Linear(37, 61), nn.Tanh(), nn.Linear(61, 37))
        self.maybe, self.dead = nn.Linear(37, 37), nn.Linear(37, 37)
        self.head = nn.Linear(37, 1)

    def forward(self, x, use=True):
        x = self.body(x) * self.scale
        return self.head(self.maybe(x) if use else x).square().mean()


def _train(harness, steps, rank):
    """Hashes of the weights after each tenth step."""
    module, hashes = harness.module, []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        harness.backward(module(torch.randn(4, 37), use=(step + rank) % 3 > 0))
        optimizer.step()
        if step % 10 == 9:
            weights = b"".join(as_bytes(p) for p in module.parameters())
            hashes.append(hashlib.sha256(weights).hexdigest())
    assert module.dead.weight.grad is None
    return hashes


def _replicas(rank, world_size):
    group, found = make_group(), {}
    for name, codec in CODECS.items():
        for steps in (200, 20):

            def wire(g, codec=codec):
                return ShardWire.connect(g, codec=codec)

            module = seeded(Uneven)
            with Harness(
                module, options=LayoutOptions(9000, 300, 4), wire=wire, group=group
            ) as harness:
                found[name, steps] = _train(harness, steps, rank)
                assert len(harness.reducer.layout.buckets) > 2
            assert_equal_on_all_ranks(dict(module.named_parameters()))
    return found


def test_L2_replicas_are_equal_after_200_steps_and_runs_repeat():
    results = run_ranks(_replicas, 3, timeout_s=120)
    assert all(result == results[0] for result in results)
    for (name, steps), hashes in results[0].items():
        assert results[0][name, 200][: steps // 10] == hashes, name
    ends = {hashes[-1] for (_, steps), hashes in results[0].items() if steps == 200}
    assert len(ends) == 3, "control: each wire rounds in its own way"


def _not_finite(rank, world_size):
    group = make_group()
    for codec in CODECS.values():
        for bad in (float("inf"), float("nan")):
            module = seeded(Uneven)
            with Harness(
                module, wire=lambda g, c=codec: ShardWire.connect(g, codec=c), group=group
            ) as harness:
                for step in range(4):
                    module.zero_grad()
                    loss = module(torch.randn(4, 37))
                    spoilt = step == 2 and rank == 1
                    harness.backward(loss * bad if spoilt else loss)
                    finite = torch.isfinite(module.body[0].weight.grad)
                    assert not finite.any() if step == 2 else finite.all(), (codec.name, step)
                    assert_equal_on_all_ranks(grads(module))


def test_L3_what_is_not_finite_on_one_rank_is_so_on_all_and_only_in_that_step():
    run_ranks(_not_finite, 3)


def _large(rank, world_size):
    module = nn.Linear(4, 4, bias=False)
    with Harness(module, wire=lambda g: ShardWire.connect(g, codec=Half(torch.float16))) as harness:
        for _ in range(2):
            module.zero_grad()
            harness.backward(module(torch.full((1, 4), 1e4)).sum())
    torch.testing.assert_close(module.weight.grad, torch.full((4, 4), 1e4), rtol=1e-3, atol=0)


def test_L3_a_sum_of_fp16_gradients_does_not_overflow_on_8_ranks():
    run_ranks(_large, 8)


def _exact(rank, world_size):
    """Weights, losses, counts and flags are those of the exact wire; doubles and small buckets too."""
    seen = {}
    for name, codec in (("exact", None), ("int8", Int8())):
        module = seeded(Uneven)
        module.double_ = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))

        def connect(g, codec=codec):
            return ShardWire.connect(g, codec=codec, min_bytes=2000)

        with Harness(module, options=SMALL, wire=connect) as harness:
            for step in range(4):
                torch.manual_seed(10 * step + rank)
                module.zero_grad()
                tokens = [70_001, 3, 12_345][rank]
                loss = module(torch.randn(4, 37), use=rank == step) + module.double_.square().sum()
                harness.window.add(weight=tokens, loss=loss.detach().float())
                harness.backward(loss * tokens)
            totals = harness.reducer.totals
            buckets = harness.reducer.layout.buckets
            small = {s.name for b in buckets if b.slots_numel * 4 < 2000 for s in b.slots}
        seen[name] = grads(module), (totals.weight, totals.micro_batches, totals.loss)
    (exact, totals), (rounded, others) = seen["exact"], seen["int8"]
    assert totals == others
    assert totals[0] == 70_001 + 3 + 12_345
    assert small
    for name, want in exact.items():
        assert (rounded[name] is None) == (want is None), name
        if want is None:
            continue
        same = torch.equal(rounded[name], want)
        if name in small or want.dtype == torch.float64:
            assert same, f"{name} was rounded"
        elif want.numel() > 256:
            assert not same, "control: this one was"
            assert relative(rounded[name], want) < 0.02


def test_L4_weights_flags_doubles_and_small_buckets_are_exact_beside_8_bits():
    run_ranks(_exact, 3)
