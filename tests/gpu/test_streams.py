"""Order on the streams of one GPU: copies, collectives, and a host that runs ahead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.cuda import SlowBackward, delay, forced, no_synchronisation
from tests.support.grounds import RunIf
from tests.support.nets import net
from tests.support.parity import assert_same, grads, seeded
from tests.support.ranks import run_ranks

pytestmark = [RunIf(min_cuda_gpus=1), pytest.mark.usefixtures("on_ground")]


class TwoStreams(nn.Module):
    """The first half of the layers runs on a stream of its own, and its gradients are slow to come."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.theirs = net(2), net(2)
        self.side = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            side = SlowBackward.apply(self.theirs(x))
            side = SlowBackward.apply(side)
        mine = self.ours(x)
        main.wait_stream(self.side)
        return (mine + side).square().mean()


def _two_streams(rank, world_size):
    module = seeded(TwoStreams)
    plain = seeded(TwoStreams)
    with forced(module) as harness:
        for index in range(4):
            torch.manual_seed(index)
            x = torch.randn(4, 8, dtype=torch.float64)
            module.zero_grad(), plain.zero_grad()
            plain(x).backward()
            expected = grads(plain)
            torch.cuda.synchronize()
            harness.before_step()
            harness.backward(module(x))
            assert_same(grads(module), expected)


def test_a_bucket_waits_for_the_stream_on_which_a_gradient_was_made():
    run_ranks(_two_streams, 1)


def _copied_too_early(rank, world_size):
    """Control of the kind: a copy on a stream that waits for nobody reads what is not there yet."""
    side, source = torch.cuda.Stream(), torch.zeros(1000)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        delay()
        source.fill_(1.0)
    early = source.clone()
    torch.cuda.current_stream().wait_stream(side)
    late = source.clone()
    return early.sum().item(), late.sum().item()


def test_control_a_copy_that_does_not_wait_reads_the_old_values():
    assert run_ranks(_copied_too_early, 1) == [(0.0, 1000.0)]


def _twenty_steps(rank, world_size, fault):
    module = seeded(lambda: net().float())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(4, 8)

    def step():
        optimizer.zero_grad()
        harness.before_step()
        loss = module(x).square().mean()
        harness.backward(loss)
        optimizer.step()
        if fault:
            loss.item()

    with forced(module) as harness:
        for _ in range(5):
            step()
        with no_synchronisation():
            for _ in range(20):
                step()


def test_the_host_waits_for_the_device_in_none_of_20_steps():
    run_ranks(_twenty_steps, 1, False)


def test_control_a_read_of_the_loss_is_seen():
    with pytest.raises(AssertionError, match="synchronizing CUDA operation"):
        run_ranks(_twenty_steps, 1, True)


def _graph(rank, world_size):
    """A captured step either says why it cannot be, or its replay gives the right gradients."""
    module = seeded(net)
    plain = copy.deepcopy(module)
    static = torch.zeros(4, 8, dtype=torch.float64)
    with forced(module) as harness:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                module.zero_grad()
                harness.backward(module(static).square().mean())
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        module.zero_grad()
        try:
            with torch.cuda.graph(graph):
                harness.backward(module(static).square().mean())
        except Exception as error:
            return f"refused: {error}"
        for index in range(3):
            torch.manual_seed(index)
            static.copy_(torch.randn(4, 8, dtype=torch.float64))
            graph.replay()
            plain.zero_grad()
            plain(static).square().mean().backward()
            assert_same(grads(module), grads(plain))
        return "right"


def test_a_captured_step_is_refused_or_right():
    assert run_ranks(_graph, 1)[0].startswith(("refused", "right"))
