"""Every kind of backward that is not a public report of its own; those are in test_modules_failures.py."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_dp.internals import autograd as autograd_seams
from tests.support.nets import Boom, data, net
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

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("each_wire")]


class NoGradient(torch.autograd.Function):
    """Uses a weight and returns no gradient for it: its hook runs while ``.grad`` is None."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _undefined(rank, world_size):
    def step(module, backward, index, rank):
        x = module[:2](data())
        if index % 2 or rank == 0:
            x = NoGradient.apply(x, module[2].weight)
        if rank == 0 and index == 2:
            x = x + module[2](x)
        backward(module[3](x).sum())

    check(rank, world_size, net, step, steps=5)


@both_worlds
def test_a_function_that_returns_no_gradient_for_a_weight(world_size):
    run_ranks(_undefined, world_size)


def _inputs(rank, world_size):
    def step(module, backward, index, rank):
        chosen = [module[1].weight, module[3].bias] if index % 2 else list(module.parameters())
        backward(module(data()).square().mean(), inputs=chosen)

    check(rank, world_size, net, step)


@both_worlds
def test_a_backward_for_chosen_inputs_only(world_size):
    run_ranks(_inputs, world_size)


def _several_roots(rank, world_size):
    def step(module, backward, index, rank):
        a = module[:2](data())
        b = module[2:](a)
        torch.autograd.backward([a.sum(), b.square().sum()])

    check(rank, world_size, net, step, raw=True)


@both_worlds
def test_one_backward_of_several_losses(world_size):
    run_ranks(_several_roots, world_size)


def _no_zeroing(rank, world_size):
    """Gradients that nobody zeroes: averages add up as on one device."""
    module = seeded(net)
    plain = copy.deepcopy(module)
    sums = None
    with Harness(module) as harness:
        for index in range(3):
            torch.manual_seed(10 * index + rank)
            x = data()
            harness.backward(module(x).square().mean())
            plain.zero_grad()
            plain(x).square().mean().backward()
            mean = mean_over_ranks(grads(plain), plain)
            sums = mean if sums is None else {k: sums[k] + v for k, v in mean.items()}
            assert_same(grads(module), sums)
        module.zero_grad(set_to_none=False)
        harness.backward(module[:2](data()).sum())
        assert module[3].weight.grad is not None, "zeros stay zeros, as on one device"
        assert not module[3].weight.grad.any()


@both_worlds
def test_gradients_that_are_not_zeroed_add_up(world_size):
    run_ranks(_no_zeroing, world_size)


def _lbfgs(rank, world_size):
    module = seeded(lambda: net(2))
    alone = copy.deepcopy(module)
    counts = []
    batches = [data() for _ in range(world_size)] if rank < 0 else None
    torch.manual_seed(5)
    batches = [(data(8), data(8)) for _ in range(world_size)]
    with Harness(module) as harness:
        for m, mine, backward in (
            (module, batches[rank : rank + 1], harness.backward),
            (alone, batches, torch.autograd.backward),
        ):
            optimizer = torch.optim.LBFGS(
                m.parameters(), max_iter=6, line_search_fn="strong_wolfe", tolerance_change=0
            )
            calls = 0

            def closure(m=m, mine=mine, backward=backward, optimizer=optimizer):
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = sum((m(x) - y).square().mean() for x, y in mine) / len(mine)
                backward(loss)
                total = loss.detach().clone()
                if m is module:  # the line search must see one loss on all ranks
                    harness.group.all_reduce_mean(total)
                return total

            for _ in range(2):
                optimizer.step(closure)
            counts.append(calls)
    assert counts[0] == counts[1]
    assert counts[0] > 4
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)


@both_worlds
def test_closures_that_run_many_times(world_size):
    run_ranks(_lbfgs, world_size)


def _died(rank, world_size):
    module = seeded(net)
    with Harness(module) as harness:
        harness.backward(module(data()).sum())
        for how in ("raw", "armed", "raw"):
            module.zero_grad()
            with pytest.raises(ValueError, match="boom"):
                module[2:](
                    Boom.apply(module[:2](data()))
                ).sum().backward()  # nobody tells the engine
            if how == "raw":
                harness.reducer.finalize()  # as before an optimizer's step
            module.zero_grad()
            plain = copy.deepcopy(module)
            x = data()
            harness.backward(module(x).square().mean())
            plain(x).square().mean().backward()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))
            assert_equal_on_all_ranks(grads(module))


@both_worlds
def test_a_backward_that_died_unnoticed_leaves_a_usable_engine(world_size):
    run_ranks(_died, world_size)


def _first_backward_dies(rank, world_size):
    module = seeded(net)
    with Harness(module) as harness:
        with pytest.raises(ValueError, match="boom"):
            harness.backward(module[2:](Boom.apply(module[:2](data()))).sum())
        assert all(p.grad is None for p in module.parameters()), (
            "no local gradient is left to step on"
        )
        harness.backward(module(data()).sum())
        assert_equal_on_all_ranks(grads(module))


def test_the_very_first_backward_may_die():
    run_ranks(_first_backward_dies, 2)


def _without_seams(rank, world_size, names):
    """Each private name of torch gone: later, but the same gradients."""
    engine = torch.autograd.Variable._execution_engine

    class NoCallbacks:
        def __getattr__(self, name):
            if name == "queue_callback":
                raise AttributeError(name)
            return getattr(engine, name)

    for name in names:
        if name == "queue_callback":
            torch.autograd.Variable._execution_engine = NoCallbacks()
            assert not autograd_seams.has_end_of_backward()
        elif name == "_current_graph_task_id":
            autograd_seams.graph_task_id = autograd_seams._one_task  # looked up once, at import
        else:
            delattr(torch._C, name)

    def step(module, backward, index, rank):
        backward(module(data()).square().mean())

    launches = check(rank, world_size, net, step)
    assert [len(each) for each in launches] == [len(launches[0])] * 4


@both_worlds
@pytest.mark.parametrize(
    "names",
    [
        ["queue_callback"],
        ["_current_graph_task_id"],
        ["_current_autograd_node"],
        ["queue_callback", "_current_graph_task_id", "_current_autograd_node"],
    ],
)
def test_without_a_private_name_of_autograd(world_size, names):
    run_ranks(_without_seams, world_size, names)
