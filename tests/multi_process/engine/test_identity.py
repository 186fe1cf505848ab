"""Replicas are proven identical: what differs is named, by parameter and rank, or mended."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.engine.replicas.digest import check_replicas
from lightning_dp.engine.replicas.digest import digest as digest_of
from lightning_dp.errors import NonFiniteGradientError, ReplicaMismatchError
from tests.support.parity import Harness, assert_equal_on_all_ranks, seeded
from tests.support.ranks import both_worlds, run_ranks
from tests.support.spies import CollectiveSpy, KernelSpy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


def net() -> nn.Module:
    module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    nn.init.ones_(module[1].weight)
    module[2].bfloat16()
    module[3].double()
    module.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    module.empty = nn.Parameter(torch.empty(0))
    return module


def _one_bit(p):
    p.data.reshape(-1)[:1].view(torch.uint8)[0] ^= 1


def _swap(p):
    p.data.reshape(-1)[:2] = p.data.reshape(-1)[:2].flip(0)


CHANGES = {
    "one bit": ("0.weight", _one_bit),
    "one bit of bfloat16": ("2.bias", _one_bit),
    "one bit of a double": ("3.weight", _one_bit),
    "two elements swapped": ("0.bias", _swap),
    "a constant": ("1.weight", lambda p: p.data.fill_(2.0)),
    "a phase": ("phase", lambda p: p.data.mul_(1j)),
    "frozen": ("2.weight", lambda p: p.requires_grad_(False)),
}


def _changes(rank, world_size):
    found = {}
    for what, (name, change) in CHANGES.items():
        module = seeded(net)
        with Harness(module) as harness:
            assert check_replicas(harness.reducer, 1)
            if rank == world_size - 1:
                change(dict(module.named_parameters())[name])
            with pytest.raises(ReplicaMismatchError) as caught:
                check_replicas(harness.reducer, 2)
            assert caught.value.names == (name,), what
            assert caught.value.ranks == (world_size - 1,)
            assert "step 2" in str(caught.value)
            found[what] = str(caught.value)
    return found


@both_worlds
def test_the_first_difference_is_named_on_every_rank(world_size):
    found = run_ranks(_changes, world_size)
    assert all("requires_grad" in each["frozen"] for each in found)


@pytest.mark.cpu_only("starts no rank")
def test_digest_sees_what_an_exclusive_or_does_not():
    def digest(tensor):
        return digest_of([tensor], torch.device("cpu"))

    equal = {digest(torch.full((1024,), value)).item() for value in (0.0, 1.0, 2.0, -1.0)}
    assert len(equal) == 4
    x = torch.arange(1000.0)
    assert digest(x) != digest(x.flip(0))
    assert digest(x) == digest(x.clone())
    strided = torch.randn(4, 3, 5, 5)
    assert digest(strided) == digest(strided.to(memory_format=torch.channels_last))
    large = torch.zeros(600_000)
    seen = set()
    for place in (0, 1, 262_143, 262_144, 599_999):
        large.zero_()[place] = 1.0
        seen.add(digest(large).item())
    assert len(seen) == 5


@pytest.mark.cpu_only("starts no rank")
def test_the_proof_costs_a_few_kernels_for_each_64_mib_whatever_the_number_of_parameters():
    def kernels(tensors):
        with KernelSpy() as spy:
            digest_of(tensors, torch.device("cpu"))
        return spy.calls

    one = kernels([torch.zeros(8)])
    assert (
        kernels([torch.zeros(8, dtype=t) for t in (torch.int8, torch.half, torch.float)] * 500)
        == one
    )
    large = [torch.zeros(5 * 2**20) for _ in range(5)]  # 100 MiB
    assert kernels(large) <= 2 * one
    # Control: the spy sees what is done for each parameter.
    with KernelSpy() as spy:
        for tensor in large:
            digest_of([tensor], torch.device("cpu"))
    assert spy.calls > 4 * one


def _settings(rank, world_size):
    values = {"lr of optimizer 0 (SGD), group 0": 0.1 if rank == 0 else 0.01}
    with Harness(seeded(net)) as harness:
        assert check_replicas(harness.reducer, 1, settings={"lr": float("nan")})
        for how in ("raise", "rebroadcast"):  # a broadcast of values would not mend that
            with pytest.raises(ReplicaMismatchError, match="sync_dist=True") as caught:
                check_replicas(harness.reducer, 7, how, settings=values)
        assert caught.value.names == tuple(values)
        assert caught.value.ranks == tuple(range(1, world_size))
        assert "0: 0.1, 1: 0.01" in str(caught.value)


@both_worlds
def test_learning_rates_that_differ_are_named_with_their_values(world_size):
    run_ranks(_settings, world_size)


def _rebroadcast(rank, world_size):
    module = seeded(net)
    with Harness(module) as harness:
        if rank:
            module[0].weight.data += rank
        assert not check_replicas(harness.reducer, 7, "rebroadcast")
        assert_equal_on_all_ranks(dict(module.named_parameters()))
        assert check_replicas(harness.reducer, 8, "rebroadcast")
        if rank:
            module[0].weight.requires_grad_(False)
        with pytest.raises(ReplicaMismatchError, match="requires_grad"):
            check_replicas(harness.reducer, 9, "rebroadcast")  # a broadcast would not mend that


@both_worlds
def test_rebroadcast_goes_on_from_rank_0(world_size):
    run_ranks(_rebroadcast, world_size)


def _cheap(rank, world_size):
    with Harness(seeded(net)) as harness:
        spy = CollectiveSpy()
        with spy:
            check_replicas(harness.reducer, 1)
        return dict(spy.calls)


def test_a_check_of_equal_replicas_is_one_exchange():
    assert run_ranks(_cheap, 2) == [{"all_gather": 2}] * 2


def _not_finite(rank, world_size, mode, bad):
    module = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]))
    found = None
    with Harness(module, check_finite=mode) as harness:
        for index in range(3):
            module.zero_grad()
            loss = module(torch.randn(4, 6)).square().mean()
            if index == 1 and rank == world_size - 1:
                handle = module[1].bias.register_hook(lambda g: g * bad)
            if index == 2 and rank == world_size - 1:
                handle.remove()
                loss = module(torch.randn(4, 6)).square().mean()
            try:
                harness.backward(loss)
            except NonFiniteGradientError as error:
                found = index, error.names, error.ranks
                assert all(p.grad is None for p in module.parameters())
    return found


@both_worlds
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_check_gradients_names_parameter_and_rank_before_the_average(world_size, bad):
    found = run_ranks(_not_finite, world_size, "raise", bad)
    assert found == [(1, ("1.bias",), (world_size - 1,))] * world_size
    assert run_ranks(_not_finite, world_size, "warn", bad) == [None] * world_size
    assert run_ranks(_not_finite, world_size, "off", bad) == [None] * world_size


def _large_but_finite(rank, world_size):
    module = seeded(lambda: nn.Linear(64, 64)).half()
    other = seeded(lambda: nn.Linear(8, 8))
    module.other = other
    with Harness(module, check_finite="raise") as harness:
        # norms that half and single precision cannot hold, of gradients that they can
        loss = (module(torch.full((1, 64), 60.0).half()).sum() * 600).float()
        harness.backward(loss + (other(torch.full((1, 8), 1e18)) * 1e17).sum())
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())


def test_check_gradients_is_not_misled_by_large_norms():
    run_ranks(_large_but_finite, 2)


def _unequal_buffers(rank, world_size):
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    with Harness(module, with_keeper=True) as harness:
        harness.before_step()
        harness.backward(module(torch.randn(4, 6)).square().sum())
        if rank == 1:
            module.register_buffer("extra", torch.ones(3))
        with pytest.raises(ReplicaMismatchError, match="extra") as caught:
            harness.keeper.before_use()
        assert caught.value.ranks == (1,)


@both_worlds
def test_buffers_that_only_one_rank_has_are_named(world_size):
    run_ranks(_unequal_buffers, world_size)
