"""torch.compile: a compiled module keeps its overlap; compiled autograd gives the same gradients."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.internals.autograd import keep_dynamo_out, split_compiled_graphs
from tests.support.parity import Harness, assert_same, grads, mean_over_ranks, seeded
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("compilers", "ground")]
OPTIONS = LayoutOptions(cap_bytes=5000, first_bytes=5000, last_bytes=5000)


def net() -> nn.Module:
    return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(32, 32), nn.Tanh())])


def backend(log):
    """aot_eager that notes when a backward graph runs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph, _):
        return make_boxed_func(graph.forward)

    def backward(graph, _):
        def run(*args):
            log.append("graph")
            return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


def _overlap(rank, world_size, split):
    log: list[str] = []
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = (
        4000  # the splitter's own; a test's net is small
    )
    module = seeded(net)
    plain = copy.deepcopy(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend(log))
    with Harness(module, options=OPTIONS) as harness:
        inner = harness.recording.launch
        harness.recording.launch = lambda bucket: log.append("launch") or inner(bucket)
        for step in range(4):
            module.zero_grad(), plain.zero_grad()
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, 32)
            log.clear()
            with split_compiled_graphs(OPTIONS.cap_bytes) if split else contextlib.nullcontext():
                loss = compiled(x).square().mean()
            harness.backward(loss)
            plain(x).square().mean().backward()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))
    return log


@both_worlds
def test_c26_a_compiled_module_keeps_its_overlap(world_size):
    # ddp: works, through the same splitting; any other engine gets all gradients when the backward ends
    for log in run_ranks(_overlap, world_size, True):
        assert log.count("graph") > 2
        first, last = log.index("launch"), len(log) - 1 - log[::-1].index("graph")
        assert first < last, f"buckets leave while graphs still run: {log}"


def test_c26_control_one_graph_leaves_nothing_to_overlap():
    for log in run_ranks(_overlap, 2, False):
        assert log.count("graph") == 1
        assert log[0] == "graph"


def _seam(rank, world_size):
    ddp = nn.parallel.DistributedDataParallel
    before = ddp._active_ddp_module
    with split_compiled_graphs(10):
        assert ddp._active_ddp_module.bucket_bytes_cap == 2**20, (
            "not below the splitter's first bucket"
        )
    with split_compiled_graphs(2**22):
        assert ddp._active_ddp_module.bucket_bytes_cap == 2**22
    assert ddp._active_ddp_module is before
    with pytest.raises(ValueError, match="x"), split_compiled_graphs(10):
        raise ValueError("x")
    assert ddp._active_ddp_module is before
    del ddp._active_ddp_module  # gone in some later torch: nothing is split, nothing fails
    with split_compiled_graphs(10):
        assert not hasattr(ddp, "_active_ddp_module")
    del torch._dynamo.trace_rules.add
    assert not keep_dynamo_out()


def test_the_seams_restore_what_they_touch_and_do_without():
    run_ranks(_seam, 1)


def _compiled_autograd(rank, world_size, how):
    from torch._dynamo import compiled_autograd

    module = seeded(lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)))
    plain = copy.deepcopy(module)
    torch._dynamo.reset()
    target = torch.compile(module, backend="aot_eager") if how == "both" else module
    compiler = torch.compile(backend="aot_eager")
    with Harness(module, options=OPTIONS) as harness:
        for step in range(2):
            module.zero_grad(), plain.zero_grad()
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, 32)
            with compiled_autograd._enable(compiler):
                harness.backward(target(x).square().mean())
            plain(x).square().mean().backward()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))
            # a raw backward too: what is still open is finished before the optimizer steps
            module.zero_grad()
            with compiled_autograd._enable(compiler):
                target(x).square().mean().backward()
            harness.reducer.finalize()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))
    return len(harness.recording.launches)


@pytest.mark.parametrize(("how", "world_size"), [("backward only", 2), ("both", 3)])
def test_compiled_autograd_falls_back_to_the_end_of_the_backward(how, world_size):
    assert min(run_ranks(_compiled_autograd, world_size, how, timeout_s=120)) > 0


def _frozen_and_recompiled(rank, world_size):
    module = seeded(net)
    plain = copy.deepcopy(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    with Harness(module, options=OPTIONS) as harness:
        for step in range(4):
            for m in (module, plain):
                m.zero_grad()
                m[0].requires_grad_(step >= 2)
            x = torch.randn(4 + step // 3, 32)
            with split_compiled_graphs(OPTIONS.cap_bytes):
                loss = compiled(x).square().mean()
            harness.backward(loss)
            plain(x).square().mean().backward()
            assert_same(grads(module), mean_over_ranks(grads(plain), plain))


def test_unfreezing_and_other_shapes_recompile():
    run_ranks(_frozen_and_recompiled, 2)
