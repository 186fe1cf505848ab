"""What an accelerator demands, run on the CPU: order on streams, late reads, forced reductions.

The fake device (``tests/support/fake_device.py``) finds what a GPU would punish; each of its rules has a
planted fault that it must find.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from lightning_dp.engine import control
from lightning_dp.engine.control import Reading
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction import reduction as reductions
from lightning_dp.engine.reduction.reduction import Reduction
from lightning_dp.engine.reduction.streams import GradientStreams
from lightning_dp.engine.replicas.digest import check_replicas
from lightning_dp.faults.watchdog import end_collectives
from tests.support import parity
from tests.support.fake_device import FakeDevice, FakeNCCL, FakeWork
from tests.support.modules import Base
from tests.support.nets import branches, data, net
from tests.support.parity import (
    Harness,
    assert_equal_on_all_ranks,
    assert_same,
    grads,
    mean_over_ranks,
    seeded,
)
from tests.support.ranks import RankError, both_worlds, run_ranks
from tests.support.spies import CollectiveSpy
from tests.support.trainers import fit, lean, ranks

pytestmark = pytest.mark.multi_process

STEPS = 6


def _train(rank, world_size, fault=None):
    """Six steps on the fake device; return its calls, and how often the host waited for it, by step."""
    device = FakeDevice()
    control.copy_to_host = device.copy_to_host
    if fault is not None:
        fault(rank)
    group = ReplicaGroup.create(torch.device("cpu"), host_reads_are_free=False)
    module = seeded(net)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    calls, reads = [], []
    with Harness(module, group=group, wire=lambda g: FakeNCCL(g, device)) as harness:
        for index in range(STEPS):
            torch.manual_seed(10 * index + rank)
            x = data()
            plain.load_state_dict(module.state_dict())
            plain.zero_grad()
            plain(x).square().mean().backward()
            device.calls.clear()
            before = device.host_reads
            with device:
                optimizer.zero_grad()
                harness.before_step()
                harness.backward(module(x).square().mean())
                found = grads(module)
                optimizer.step()
            calls.append(list(device.calls))
            reads.append(device.host_reads - before)
            assert_same(found, mean_over_ranks(grads(plain), plain))
        with device:
            harness.reducer.settle()
    return calls, reads


@both_worlds
def test_the_engine_keeps_an_accelerators_rules(world_size):
    calls, reads = run_ranks(_train, world_size)[0]
    for step in calls:
        launched = [what for verb, what in step if verb == "launch"]
        waited = [what for verb, what in step if verb == "wait"]
        assert launched == waited, (
            "each collective is waited for once, in the order of the launches"
        )
        assert len(launched) > 2
    assert reads[0] > 0, "the first steps are read at once: that is when things are learnt"
    assert reads[3:] == [0, 0, 0], "afterwards the host never waits for the device"
    assert [verb for verb, _ in calls[-1] if verb in ("record", "synchronize")] == [
        "synchronize",
        "record",
    ], "last step's control block is read before this step's is queued"


def missing_wait(rank):
    real = reductions.interruptible_wait

    def wait(work, **kwargs):
        if not isinstance(work, FakeWork) or next(waits) != 1:
            real(work, **kwargs)

    waits = iter(range(10**6))
    reductions.interruptible_wait = wait


def reused_in_flight(rank):
    real = Reduction._launch_next

    def launch(self, **kwargs):
        bucket = self.sequence[self.launched]
        real(self, **kwargs)
        bucket.grads.zero_()

    Reduction._launch_next = launch


def early_host_read(rank):
    def means(self):
        if self._means is None:
            self._means = self._host.tolist()
        return self._means

    Reading.means = means


def out_of_order(rank):
    real = Reduction._plan_launches

    def plan(self):
        live, early = real(self)
        return (live[:early][::-1] + live[early:], early) if rank == 1 else (live, early)

    Reduction._plan_launches = plan


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (missing_wait, r"touches the memory of bucket \d+, which is in flight"),
        (reused_in_flight, r"zero_.* touches the memory of bucket \d+, which is in flight"),
        (early_host_read, "early host read"),
        (out_of_order, "collective out of order"),
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[int], None], found):
    with pytest.raises(RankError, match=found):
        run_ranks(_train, 2, fault)


# Gradients that were made on several streams ([Note: streams] in engine/reduction/streams.py).


class FakeStream:
    """Records what it is told to wait for."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


def _streams(rank, world_size, joins):
    """Half of a module's gradients come on a stream of their own; return what was recorded."""
    calls = []
    main, side = FakeStream("main", calls), FakeStream("side", calls)
    current = [main]
    reductions.gradient_streams = lambda _: GradientStreams(lambda: current[0])
    ready, copy_in = Reduction.gradient_ready, reductions.copies.copy_in

    def on_its_stream(self, slot):
        current[0] = side if slot.name[0] in "23" else main
        ready(self, slot)
        current[0] = main

    Reduction.gradient_ready = on_its_stream
    reductions.copies.copy_in = lambda *a, **k: (calls.append("copy"), copy_in(*a, **k))
    if not joins:
        GradientStreams.joined = lambda self: nullcontext()
    group = ReplicaGroup.create(torch.get_default_device(), alone=True)
    with Harness(seeded(net), group=group) as harness:
        for _ in range(2):
            calls.clear()
            harness.module.zero_grad()
            harness.backward(harness.module(data()).sum())
    return calls


def keeps_order(calls):
    """Whether each copy on the main stream stands between two waits for and of the other one."""
    copies = [place for place, call in enumerate(calls) if call == "copy"]
    around = [(calls[max(0, at - 1)], calls[min(at + 1, len(calls) - 1)]) for at in copies]
    return ("main waits for side", "side waits for main") in around


def test_a_bucket_is_filled_when_the_streams_of_its_gradients_are_done():
    assert keeps_order(run_ranks(_streams, 1, True)[0])


def test_control_a_bucket_that_waits_for_no_stream_is_seen():
    assert not keeps_order(run_ranks(_streams, 1, False)[0])


def test_nccl_is_aborted_before_sockets_are_cut(monkeypatch):
    calls = []
    groups = [
        mock.Mock(backend=name) for name in ("lean_gloo", "nccl", "gloo", "cpu:gloo,cuda:nccl")
    ]
    for group in groups:
        group.abort = lambda group=group: calls.append(group.backend)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: group.backend)
    end_collectives(groups, lambda: calls.append("cut"))
    assert calls == ["nccl", "cpu:gloo,cuda:nccl", "cut", "lean_gloo", "gloo"]


# A world of one with its reduction forced: the whole path on a single device.


def _alone(rank, world_size):
    module = seeded(branches)
    plain = copy.deepcopy(module)
    group = ReplicaGroup.create(torch.get_default_device(), alone=True)
    assert group.reduces
    with Harness(module, group=group) as harness:
        for index in range(5):
            module.zero_grad(), plain.zero_grad()
            x, use = data(), index != 2
            plain(x, use).square().mean().backward()
            with CollectiveSpy() as spy:
                harness.before_step()
                harness.backward(module(x, use).square().mean())
            assert_same(grads(module), grads(plain))
            buckets = len(harness.reducer.layout.buckets)
            assert buckets > 2
            assert spy.ops["allreduce"] == buckets, "one a bucket"
            assert spy.openings == int(index > 0 and not group.host_reads_are_free)


@pytest.mark.usefixtures("each_reading")
def test_a_world_of_one_reduces_when_it_is_told_to():
    run_ranks(_alone, 1)


def _not_alone(rank, world_size):
    with Harness(seeded(net)) as harness, CollectiveSpy().expecting():
        assert not harness.group.reduces
        harness.backward(harness.module(data()).sum())


def test_control_a_world_of_one_sends_nothing_otherwise():
    run_ranks(_not_alone, 1)


def _trainer_alone(rank, world_size, port, forced):
    strategy = lean(bucket_cap_mb=0.0004)
    strategy._engine.reduces_alone = forced
    module = Base()
    with CollectiveSpy() as spy:
        fit(module, rank, world_size, port, strategy)
    return dict(module.named_parameters()), spy.ops["allreduce"]


@pytest.mark.usefixtures("ground")
def test_a_trainer_alone_with_its_reduction_forced_trains_the_same_weights():
    (forced, sent), (plain, nothing) = (ranks(_trainer_alone, 1, f)[0] for f in (True, False))
    assert sent > nothing
    for name, value in plain.items():
        torch.testing.assert_close(forced[name], value, rtol=1e-12, atol=1e-12)


# A default device is the user's: what the engine keeps on the host says so.


def _default_device(rank, world_size):
    """The module is on the CPU; a tensor that the engine makes without a device would be on meta."""
    module = seeded(net)
    with Harness(module) as harness:
        for index in range(5):
            torch.manual_seed(10 * index + rank)
            x = data()
            module.zero_grad()
            torch.set_default_device("meta")
            harness.backward(module(x).square().mean())
            assert check_replicas(harness.reducer, index)
            torch.set_default_device("cpu")
            assert_equal_on_all_ranks(grads(module))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_default_device_of_the_users_does_not_move_what_the_host_needs(deferred, monkeypatch):
    monkeypatch.setattr(parity, "DEFERRED", deferred)
    run_ranks(_default_device, 2)
