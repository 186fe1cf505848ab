"""torch's communication hooks, unmodified, on gloo, with several buckets; and what they remember.

b16: `ddp` silently ignores hooks on a CPU, and fails for a functools.partial.
"""

from __future__ import annotations

import copy
import functools
import io

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

from lightning_dp.engine.comm_hooks import CommHookWire
from lightning_dp.engine.hook_state import hook_state, load_hook_state
from lightning_dp.engine.layout import LayoutOptions
from tests.support.parity import (
    Harness,
    as_bytes,
    assert_equal_on_all_ranks,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multi_process
both_worlds = pytest.mark.parametrize("world_size", [2, 3])
OPTIONS = LayoutOptions(cap_bytes=9000, first_bytes=5000, last_bytes=5000)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
        self.maybe = nn.Linear(32, 32)
        self.dead = nn.Linear(32, 32)

    def forward(self, x, use=True):
        x = self.body(x)
        return (self.maybe(x) if use else x).square().mean()


def power(group, **options):
    defaults = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    return powerSGD_hook.PowerSGDState(None, **{**defaults, **options})


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
    "power sgd": (powerSGD_hook.powerSGD_hook, power, None, None),
    "power sgd, fp16 wrapper": (
        powerSGD_hook.powerSGD_hook, power, default_hooks.fp16_compress_wrapper, None,
    ),
    "power sgd, batched": (
        powerSGD_hook.powerSGD_hook,
        functools.partial(power, batch_tensors_with_same_shape=True), None, None,
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
    module = seeded(Net)
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
    state = power(None)
    module = seeded(Net)
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
    module = seeded(Net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = []
    with Harness(
        module,
        options=OPTIONS,
        wire=lambda g: CommHookWire(g, powerSGD_hook.powerSGD_hook, power(g), heal=heal),
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


def _resume(rank, world_size, change):
    """Ten steps at once, or five, a checkpoint, and five more: the same bits."""

    def run(steps, saved=None, state=None, frozen=False):
        torch.manual_seed(0)
        module = Net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        state = power(None) if state is None else state
        with Harness(
            module,
            options=OPTIONS,
            wire=lambda g: CommHookWire(g, powerSGD_hook.powerSGD_hook, state),
        ) as harness:
            told = ""
            if saved is not None:
                module.load_state_dict(saved["module"])
                optimizer.load_state_dict(saved["optimizer"])
                told = load_hook_state(state, saved["hook"], harness.group)
                harness.reducer.layout.remembered = list(saved["hook"]["layout"])
            for step in steps:
                module.maybe.requires_grad_(step > 2)  # a layout that grew once
                module.body[0].requires_grad_(not frozen)
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                harness.backward(module(torch.randn(4, 32)))
                optimizer.step()
                assert_equal_on_all_ranks(dict(module.named_parameters()))
            hook = hook_state(state, harness.reducer.layout, harness.group)
        kept = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "hook": hook}
        return {k: as_bytes(v) for k, v in module.state_dict().items()}, kept, told

    whole, _, _ = run(range(10))
    _, kept, _ = run(range(5))
    file = io.BytesIO()
    torch.save(kept, file)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, file.getvalue())  # only rank 0's was written
    saved = torch.load(io.BytesIO(everyone[0]), weights_only=True)
    assert saved["hook"]["world_size"] == world_size
    assert all(
        len(parts) == world_size for parts in saved["hook"]["per_rank"]["error_dict"].values()
    )
    if change == "none":
        resumed, _, told = run(range(5, 10), saved)
        assert not told
        assert resumed == whole
    elif change == "no hook state":  # control
        resumed, _, _ = run(
            range(5, 10), {**saved, "hook": {**saved["hook"], "common": {}, "per_rank": {}}}
        )
        assert resumed != whole
    elif change == "world size":
        saved["hook"]["world_size"] = 7
        resumed, _, told = run(range(5, 10), saved)
        assert "7 rank(s)" in told
    elif change == "settings":
        _, _, told = run(range(5, 10), saved, power(None, matrix_approximation_rank=3))
        assert "matrix_approximation_rank" in told
    elif change == "layout":
        run(range(5, 10), saved, frozen=True)  # other buckets: begins empty, says so, goes on


@both_worlds
def test_power_sgd_resumes_with_the_same_bits(world_size):
    run_ranks(_resume, world_size, "none")


@pytest.mark.parametrize("change", ["no hook state", "world size", "settings", "layout"])
def test_power_sgd_resumes_in_a_changed_run(change):
    run_ranks(_resume, 2, change)


class Own:
    """A user's state with state_dict, and one without."""

    def __init__(self):
        self.count, self.table, self.group = 0, {"a": torch.zeros(2)}, object()

    def state_dict(self):
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state):
        self.count, self.table = state["count"], state["table"]


class Bare:
    def __init__(self):
        self.count, self.names, self.lock = 0, ["x"], object()


def _own_state(rank, world_size):
    with Harness(nn.Linear(2, 2)) as harness:
        layout, group = harness.reducer.layout, harness.group
        for make in (Own, Bare):
            state = make()
            state.count = 5
            saved = hook_state(state, layout, group)
            assert "group" not in saved["common"]
            assert "lock" not in saved["common"]
            fresh = make()
            assert not load_hook_state(fresh, saved, group)
            assert fresh.count == 5
        assert hook_state(None, layout, group) is None
        assert hook_state(group.process_group, layout, group) is None


def test_a_users_own_state_is_kept_too():
    run_ranks(_own_state, 2)
