"""torch's communication hooks, unmodified, on gloo, with several buckets; and what they remember.

b16: `ddp` silently ignores hooks on a CPU, and fails for a functools.partial.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.comm_hook import CommHookWire
from lightning_dp.errors import ConfigError
from tests.support import grounds
from tests.support.nets import Wide, power_sgd
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]
OPTIONS = LayoutOptions(cap_bytes=9000, first_bytes=5000, last_bytes=5000)


class Counting:
    def __init__(self, hook):
        self.hook, self.seen = hook, []

    def __call__(self, state, bucket):
        self.seen.append((bucket.index(), bucket.is_last(), len(bucket.gradients())))
        assert sum(g.numel() for g in bucket.gradients()) <= bucket.buffer().numel()
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        return self.hook(state, bucket)


def replacing(state, bucket):
    """Returns another tensor than the bucket's, as a user's hook may."""
    mean = bucket.buffer().clone()
    dist.all_reduce(mean)
    bucket.set_buffer(mean / dist.get_world_size())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


HOOKS = {
    # name: (hook, state, wrapper, tolerance)
    "allreduce": (default_hooks.allreduce_hook, None, None, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, None, None, 2e-3),
    "bf16": (default_hooks.bf16_compress_hook, None, None, 2e-2),
    "fp16 wrapper": (default_hooks.allreduce_hook, None, default_hooks.fp16_compress_wrapper, 2e-3),
    "bf16 wrapper": (default_hooks.allreduce_hook, None, default_hooks.bf16_compress_wrapper, 2e-2),
    "power sgd": (powerSGD_hook.powerSGD_hook, power_sgd, None, None),
    "power sgd, fp16 wrapper": (
        powerSGD_hook.powerSGD_hook, power_sgd, default_hooks.fp16_compress_wrapper, None,
    ),
    "power sgd, batched": (
        powerSGD_hook.powerSGD_hook,
        functools.partial(power_sgd, batch_tensors_with_same_shape=True), None, None,
    ),
    "post-local": (
        post_localSGD_hook.post_localSGD_hook,
        lambda group: post_localSGD_hook.PostLocalSGDState(None, group.process_group, 2), None, 1e-6,
    ),
    "partial": (functools.partial(default_hooks.allreduce_hook), None, None, 1e-6),
    "replacing": (replacing, None, None, 1e-6),
}  # fmt: skip


def _hook(rank, world_size, which, steps):
    hook, state, wrapper, tolerance = HOOKS[which]
    counting = Counting(hook)
    functools.update_wrapper(counting, getattr(hook, "func", hook))
    module = seeded(Wide)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def wire(group):
        return CommHookWire(group, counting, state(group) if state else None, wrapper)

    with Harness(module, options=OPTIONS, wire=wire) as harness:
        for step in range(steps):
            torch.manual_seed(10 * step + rank)
            x, use = torch.randn(4, 32), step != 3 and not (step == 4 and rank == 0)
            plain.load_state_dict(module.state_dict())
            plain.zero_grad(), optimizer.zero_grad()
            counting.seen.clear()
            harness.backward(module(x, use))
            plain(x, use).backward()
            expected, found = mean_over_ranks(grads(plain), plain), grads(module)
            for name, want in expected.items():
                assert (found[name] is None) == (want is None), f"{name} at step {step}"
                if tolerance is not None and want is not None:
                    torch.testing.assert_close(found[name], want, rtol=tolerance, atol=tolerance)
            assert_equal_on_all_ranks(found)
            buckets = harness.reducer.layout.buckets
            assert sorted(i for i, _, _ in counting.seen) == list(range(len(buckets)))
            assert [last for _, last, _ in counting.seen] == [False] * (len(buckets) - 1) + [True]
            optimizer.step()
        assert_equal_on_all_ranks(dict(module.named_parameters()))
        assert len(buckets) > 3


@both_worlds
@pytest.mark.parametrize("which", HOOKS)
def test_b16_torchs_hooks_on_gloo_with_several_buckets(world_size, which):
    run_ranks(_hook, world_size, which, 6)


def _groups(rank, world_size):
    state = power_sgd()
    module = seeded(Wide)
    with Harness(
        module, options=OPTIONS, wire=lambda g: CommHookWire(g, powerSGD_hook.powerSGD_hook, state)
    ) as harness:
        assert state.process_group is harness.group.process_group
        harness.backward(module(torch.randn(4, 32)))
    assert state.process_group is None, "a state outlives its run"
    assert debugging_hooks.noop_hook  # a hook that does nothing leaves local gradients
    with Harness(module, wire=lambda g: CommHookWire(g, debugging_hooks.noop_hook)) as harness:
        module.zero_grad()
        plain = copy.deepcopy(module)
        x = torch.randn(4, 32) * (rank + 1)
        harness.backward(module(x))
        plain(x).backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_a_state_borrows_the_engines_group_and_a_hook_decides():
    run_ranks(_groups, 2)


def _heals(rank, world_size, heal):
    """A loss scaler's overflow must not stay in PowerSGD's error for ever."""
    module = seeded(Wide)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(grounds.CURRENT.device_type, init_scale=4.0)
    skipped = []
    with Harness(
        module,
        options=OPTIONS,
        wire=lambda g: CommHookWire(g, powerSGD_hook.powerSGD_hook, power_sgd(), heal=heal),
    ) as harness:
        for step in range(7):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            loss = module(torch.randn(4, 32))
            harness.backward(scaler.scale(loss * (float("inf") if step == 4 and rank == 1 else 1)))
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < before)
            assert_equal_on_all_ranks(dict(module.named_parameters()))
    return skipped


@both_worlds
def test_power_sgd_recovers_from_a_loss_scalers_overflow(world_size):
    expected = [step == 4 for step in range(7)]
    assert run_ranks(_heals, world_size, True) == [expected] * world_size


def test_control_without_healing_every_later_step_is_skipped():
    assert run_ranks(_heals, 2, False) == [[False] * 4 + [True] * 3] * 2


# b15. ddp: torch's PowerSGD over gloo with more than one bucket aborts the process.


def _power_sgd(rank, world_size):
    module = seeded(lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    def wire(group):
        state = powerSGD_hook.PowerSGDState(
            group.process_group, matrix_approximation_rank=2, start_powerSGD_iter=3, warm_start=True
        )
        return CommHookWire(group, powerSGD_hook.powerSGD_hook, state)

    options = LayoutOptions(cap_bytes=10_000, first_bytes=5_000, last_bytes=5_000)
    with Harness(module, wire=wire, options=options) as harness:
        for index in range(12):
            torch.manual_seed(10 * index + rank)
            optimizer.zero_grad()
            harness.backward(module(torch.randn(4, 32)).square().mean())
            optimizer.step()
            assert_equal_on_all_ranks(dict(module.named_parameters()))
        assert len(harness.reducer.layout.buckets) > 3


@both_worlds
def test_b15_power_sgd_on_gloo_with_several_buckets(world_size):
    run_ranks(_power_sgd, world_size)


def _refused(rank, world_size):
    with Harness(nn.Linear(2, 2)) as harness:
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

        for hook in (
            powerSGD_hook.batched_powerSGD_hook,
            functools.partial(powerSGD_hook.batched_powerSGD_hook),
            quantization_hooks.quantization_pertensor_hook,
            quantization_hooks.quantization_perchannel_hook,
        ):
            with pytest.raises(ConfigError, match="cannot work here"):
                CommHookWire(harness.group, hook)
        for wrap in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
            with pytest.raises(ConfigError, match="cannot work here"):
                CommHookWire(harness.group, powerSGD_hook.batched_powerSGD_hook, None, wrap)


@pytest.mark.cpu_only("NCCL can send what these hooks gather")
def test_b15_hooks_that_cannot_work_are_refused_with_the_reason():
    run_ranks(_refused, 2)
