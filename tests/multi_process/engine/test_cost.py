"""Public reports of cost, memory and determinism, each as a test. A comment says what `ddp` does today.

Numbers are those of the list in docs/modules.md.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_dp.engine.plan.layout import LayoutOptions
from tests.support.logs import log_lines
from tests.support.nets import branches, data
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    assert_same,
    check,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy, storage_bytes

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


# c19. ddp(find_unused_parameters=True): walks the graph after every forward, and hides dead layers.


def _dead_layers(rank, world_size):
    records = log_lines("lightning_dp.engine.reduction.reducer")
    module = seeded(branches)
    with Harness(module) as harness:
        for _ in range(4):
            module.zero_grad()
            with CollectiveSpy().expecting():
                loss = module(data()).sum()
            harness.backward(loss)
    return [line for line in records if "no gradient on any rank" in line]


@both_worlds
def test_c19_dead_layers_cost_nothing_and_are_said_once(world_size):
    said = run_ranks(_dead_layers, world_size)
    assert len(said[0]) == 1
    assert "dead.weight" in said[0][0]
    assert not any(said[1:]), "only rank 0 speaks"


# c20. ddp: the gradient of an unused parameter is None or zero depending on a flag.


def _none_or_zero(rank, world_size):
    seen = []

    def step(module, backward, index, rank):
        backward(module(data(), use=index == 0 and rank == 0).square().mean())
        seen.append(module.maybe.weight.grad is None)

    check(rank, world_size, branches, step, steps=2)
    return seen[1::2]  # the engine's, after the plain run's


@both_worlds
def test_c20_unused_everywhere_is_none_used_somewhere_is_the_mean(world_size):
    assert run_ranks(_none_or_zero, world_size) == [[False, True]] * world_size


def _optimizer_leaves_dead_weights(rank, world_size):
    module = seeded(branches)
    before = module.dead.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    with Harness(module) as harness:
        for _ in range(3):
            optimizer.zero_grad()
            harness.backward(module(data()).square().mean())
            optimizer.step()
    assert torch.equal(module.dead.weight, before)


def test_c20_weight_decay_does_not_move_a_dead_weight():
    run_ranks(_optimizer_leaves_dead_weights, 2)


# c21. ddp: once wrong, fixed in torch 2.4: a parameter used only under no_sync.


def _used_in_the_first_micro_batch_only(rank, world_size):
    module = seeded(branches)
    plain = copy.deepcopy(module)
    with Harness(module) as harness:
        for window in range(3):
            module.zero_grad(), plain.zero_grad()
            for micro in range(2):
                torch.manual_seed(100 * window + 10 * micro + rank)
                x = data()
                use = micro == 0 and rank == 0
                plain(x, use).square().mean().backward()
                loss = module(x, use).square().mean()
                if micro == 0:
                    with harness.window.closed():
                        harness.backward(loss)
                else:
                    harness.backward(loss)
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))


@both_worlds
def test_c21_used_in_an_earlier_micro_batch_only(world_size):
    run_ranks(_used_in_the_first_micro_batch_only, world_size)


# c22. ddp: no_sync around the backward alone has no effect: it is read in forward.


def _closed_in_backward_only(rank, world_size):
    module = seeded(branches)
    plain = copy.deepcopy(module)
    with Harness(module) as harness:
        x = data() * (rank + 1)
        loss = module(x).square().mean()
        with harness.window.closed():
            harness.backward(loss)
        plain(x).square().mean().backward()
        assert not harness.recording.launches
        assert_same(grads(module), grads(plain))  # local
        with harness.window.closed():
            loss = module(x).square().mean()
        plain(x).square().mean().backward()
        harness.backward(loss)  # forward inside, backward outside: reduces
        assert_same(grads(module), mean_over_ranks(grads(plain), plain))


@both_worlds
def test_c22_the_window_is_read_in_backward(world_size):
    run_ranks(_closed_in_backward_only, world_size)


# c23. ddp: buckets stay allocated in forward; without gradient_as_bucket_view gradients exist twice.


def _storage(rank, world_size):
    module = seeded(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]))
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    options = LayoutOptions(cap_bytes=600_000, first_bytes=300_000, last_bytes=300_000)
    with Harness(module, options=options) as harness:
        buckets = harness.reducer.layout.buckets
        for _ in range(3):
            module.zero_grad()
            harness.before_step()
            assert storage_bytes(b.flat for b in buckets) == 0, "no gradient lives: nothing is held"
            loss = module(torch.randn(4, 256)).square().mean()
            harness.backward(loss)
            held = [b.flat for b in buckets] + [p.grad for p in module.parameters()]
            assert gradient_bytes <= storage_bytes(held) <= 1.05 * gradient_bytes
        loss = module(torch.randn(4, 256)).square().mean()
        module.zero_grad()  # Lightning's order: after the forward, before the backward
        harness.reducer.arm(loss)
        assert storage_bytes(b.flat for b in buckets) == 0, "activations need the memory now"
        harness.backward(loss)
        kept = module[0].weight.grad
        value = kept.clone()
        module.zero_grad()
        assert harness.reducer.release_storage() > 0
        harness.backward(module(torch.randn(4, 256)).square().mean())
        assert torch.equal(kept, value), "a gradient that somebody kept stays what it was"


@both_worlds
def test_c23_gradients_are_stored_once_and_nothing_in_forward(world_size):
    run_ranks(_storage, world_size)


# c24. ddp: sends all buffers in every forward.


def bn_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()


def _batch_norm(rank, world_size):
    module = seeded(bn_net)
    plain = copy.deepcopy(module)
    ddp = nn.parallel.DistributedDataParallel(plain, broadcast_buffers=True)
    with Harness(module, with_keeper=True) as harness:
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
        for index in range(6):
            torch.manual_seed(10 * index + rank)
            x = data()
            for m, o, backward in (
                (module, sgd[0], harness.backward),
                (ddp, sgd[1], torch.autograd.backward),
            ):
                o.zero_grad()
                if m is module:
                    with CollectiveSpy().expecting():
                        harness.before_step()
                        loss = m(x).square().mean()
                else:
                    loss = m(x).square().mean()
                backward(loss)
                o.step()
        harness.keeper.before_use()
        assert_equal_on_all_ranks(module.state_dict())
    if rank == 0:
        return {k: v.clone() for k, v in module.state_dict().items()}, plain.state_dict()
    return None


def test_c24_no_buffer_is_sent_in_forward_and_rank_0_is_as_with_ddp():
    ours, theirs = run_ranks(_batch_norm, 2)[0]
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
