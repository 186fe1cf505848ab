"""Z6, Z13, Z19, Z21: what goes wrong with ``zero=1`` ends on all ranks, soon, and is explained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_dp.errors import ConfigError, RankFailedError, ReplicaMismatchError
from lightning_dp.optim.exchange import Exchange
from lightning_dp.optim.gather import ParameterGather
from tests.multi_process.optim.test_zero_checkpoint import Saves
from tests.multi_process.optim.test_zero_trainer import Net
from tests.support.logs import log_lines
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.trainers import fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]

SOON_S = 20.0


class Boom(ValueError):
    pass


def _raise() -> None:
    raise Boom("boom")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class InBackward(Net):
    """Acts on rank 1 in the third step, in the midst of its backward."""

    act: Callable[[], None]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 2:
            loss.register_hook(lambda _: type(self).act())
        return loss


def _at_third(owner: type, name: str, act: Callable[[], None], *, after: bool) -> None:
    """Let the third call of ``owner.name`` act, in place of the original or behind it."""
    original, calls = getattr(owner, name), []

    def call(self: Any, *args: Any) -> Any:
        calls.append(0)
        if len(calls) == 3 and not after:
            act()
        result = original(self, *args)
        if len(calls) == 3:
            act()
        return result

    setattr(owner, name, call)


def _fails(
    rank: int, world: int, port: int, place: str, act: Callable[[], None], folder: Path
) -> None:
    module = Net()
    kept = folder / "kept.ckpt"
    if place == "reduce":
        InBackward.act = staticmethod(act)
        module = InBackward()
    elif rank == 1:
        if place == "step":
            _at_third(Exchange, "enter", act, after=True)
        else:
            _at_third(ParameterGather, "run", act, after=False)
    before = {name: p.shape for name, p in module.named_parameters()}
    lines = log_lines()
    begin = time.monotonic()
    saves = OnExceptionCheckpoint(folder)
    options = {"gradients": "own" if place != "gather" else "all"}
    if act is _kill:  # of the other format, to go on from
        options["format"] = "sharded"
    strategy = lean(zero=options, shared_memory=False)
    expected = Boom if rank == 1 else RankFailedError
    with pytest.raises(expected):
        fit(
            module,
            rank,
            world,
            port,
            strategy,
            lambda: [saves, Saves(kept, 1)],
            max_epochs=3,
            enable_checkpointing=True,
        )
    assert time.monotonic() - begin < SOON_S
    assert {name: p.shape for name, p in module.named_parameters()} == before
    assert any("was not written" in line for line in lines)
    assert [path.name for path in folder.iterdir() if path.suffix == ".ckpt"] == [kept.name]


def _goes_on(rank: int, world: int, port: int, folder: Path) -> None:
    runner = fit(Net(), rank, world, port, lean(zero=1), ckpt_path=str(folder / "kept.ckpt"))
    assert runner.global_step == 4


@pytest.mark.parametrize("place", ["reduce", "step", "gather"])
def test_z19_an_exception_ends_all_ranks_and_leaves_whole_parameters(place, tmp_path):
    ranks(_fails, 2, place, _raise, tmp_path)
    ranks(_goes_on, 2, tmp_path)


@pytest.mark.parametrize("place", ["reduce", "step", "gather"])
def test_z19_a_killed_rank_ends_the_others(place, tmp_path):
    begin = time.monotonic()
    first, _ = ranks(_fails, 2, place, _kill, tmp_path, expect_failure=True)
    assert first is None, first
    assert time.monotonic() - begin < 2 * SOON_S
    ranks(_goes_on, 3, tmp_path)


# Loss scaling


class Overflows(Net):
    """In the second step rank 1's gradient of one element is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.skipped: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch.float(), True)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss + self.head.bias.sum() * 1e38 * 1e38
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.skipped.append(self.trainer.strategy._engine.windows.last_step_skipped)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def _scaled(rank: int, world: int, port: int) -> None:
    found = {}
    for name, zero in (("own", {"gradients": "own"}), ("plain", 0)):
        module = Overflows()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        strategy = lean(zero=zero, shared_memory=False, check_replicas_every_n_steps=1)
        fit(module, rank, world, port, strategy, plugins=[plugin])
        assert module.skipped == [False, True, False, False], (name, module.skipped)
        assert scaler.get_scale() == 2.0
        assert_equal_on_all_ranks(dict(module.named_parameters()))
        found[name] = module.state_dict()
    torch.testing.assert_close(found["own"], found["plain"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_z6_an_overflow_in_one_ranks_slice_skips_the_step_on_all(world_size):
    ranks(_scaled, world_size)


# Optimizers that do not fit, and ranks that ask for different things


class Twice(torch.optim.SGD):
    """Calls its closure twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            for _ in range(2):
                with torch.enable_grad():
                    closure()
        return super().step()


class Counts(torch.optim.SGD):
    """Keeps in its group how many parameters it has stepped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        many = len(group["params"]) > 2  # not what a probe with one or two sees
        used = sum(p.numel() for p in group["params"] if p.grad is not None)
        group["stepped"] = float(used) if many else 0.0
        super().step()
        return loss


class Chooses(Net):
    """With an optimizer of a given class."""

    make: Callable[[Any], Any]

    def configure_optimizers(self) -> Any:
        return type(self).make(self.parameters())


def _chooses(
    rank: int, world: int, port: int, make: Callable[[Any], Any], zero: Any
) -> tuple[bool, list[str]]:
    Chooses.make = staticmethod(make)
    lines = log_lines()
    strategy = lean(zero=zero, check_replicas_every_n_steps=1)
    module = Chooses()
    fit(module, rank, world, port, strategy)
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    return bool(strategy._engine.zero._sharded), list(lines)


def _misfits(rank: int, world: int, port: int) -> None:
    def lbfgs(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, 0.1, max_iter=2)

    def momentum(cls: Any) -> Any:
        return lambda parameters: cls(parameters, 0.01, 0.9)

    active, lines = _chooses(rank, world, port, lbfgs, 1)
    assert not active
    assert (rank == 0) == any("stays whole on every rank: whether LBFGS" in line for line in lines)
    active, lines = _chooses(rank, world, port, lambda p: torch.optim.SGD(p, 0.1), 1)
    assert not active
    assert (rank == 0) == any("there is no memory to save" in line for line in lines)
    assert not _chooses(rank, world, port, momentum(torch.optim.SGD), {"except_": ["SGD"]})[0]
    assert _chooses(rank, world, port, momentum(torch.optim.SGD), {"except_": ["body.*"]})[0]
    assert _chooses(rank, world, port, momentum(torch.optim.SGD), {"split": "off"})[0]
    with pytest.raises(ConfigError, match=r"called its closure twice in one step.*except_"):
        _chooses(rank, world, port, momentum(Twice), {"split": ["Twice"]})


def _counts(rank: int, world: int, port: int) -> None:
    with pytest.raises(ReplicaMismatchError, match=r"'stepped of group 0'.*except_.*Counts"):
        _chooses(rank, world, port, lambda p: Counts(p, 0.01, 0.9), {"split": ["Counts"]})


def _ranks_differ(rank: int, world: int, port: int) -> None:
    with pytest.raises(ConfigError, match="ranks differ in zero: rank 0: 1, rank 1: 0"):
        fit(Net(), rank, world, port, lean(zero=1 - rank))


def _outer(module: Net) -> Tensor:
    return _inner(module)


def _inner(module: Net) -> Tensor:
    return module.head.weight.grad.norm()


def _reads(rank: int, world: int, port: int) -> None:
    class Reads(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = {name: p.grad.norm() for name, p in self.named_parameters() if "head" in name}
            assert_equal_on_all_ranks(norms)

    lines = log_lines()
    fit(Reads(), rank, world, port, lean(zero=1, shared_memory=False))
    told = [line for line in lines if "Reads.on_before_optimizer_step may read them" in line]
    assert len(told) == (rank == 0)

    class ReadsLater(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            assert_equal_on_all_ranks({"norm": self.head.weight.grad.norm()})

    fit(ReadsLater(), rank, world, port, lean(zero=1, shared_memory=False))

    class ReadsInAFunction(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            assert_equal_on_all_ranks({"norm": _outer(self)})

    fit(ReadsInAFunction(), rank, world, port, lean(zero=1, shared_memory=False))
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual optimization may add"):
        fit(module, rank, world, port, lean(zero={"gradients": "own"}))


def test_z13_optimizers_that_do_not_fit_stay_whole_or_are_refused():
    ranks(_misfits, 2)


def test_z13_settings_that_differ_after_a_step_name_the_key_and_the_remedy():
    ranks(_counts, 2)


def test_z21_ranks_that_differ_in_zero_end_at_the_start():
    ranks(_ranks_differ, 2)


def test_z5_whoever_may_read_gradients_gets_all_of_them():
    ranks(_reads, 2)


def _alone(rank: int, world: int, port: int) -> None:
    lines = log_lines()
    fit(Net(), rank, world, port, lean(zero=1))
    assert sum("one rank has nothing to share" in line for line in lines) == 1


def test_one_rank_trains_as_without():
    ranks(_alone, 1)
