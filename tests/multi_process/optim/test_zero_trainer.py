"""Z3, Z4, Z5, Z9, Z10, Z11, Z12, Z14: ``zero=1`` in a Trainer against the same run without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_dp.engine.wires import shard
from lightning_dp.errors import ReplicaMismatchError
from lightning_dp.optim.gather import ParameterGather
from tests.multi_process.optim.test_step_bits import assert_same_bytes
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import both_worlds
from tests.support.trainers import fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]


# Newer versions of torch have another name for it.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Net(pl.LightningModule):
    """Float64, so that what differs is not rounding; ``dead`` is used nowhere, ``maybe`` in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 23), nn.Tanh(), nn.Linear(23, 11))
        self.maybe, self.dead = nn.Linear(11, 11), nn.Linear(5, 5)
        self.head = nn.Linear(11, 1)
        self.double()

    def loss(self, x: Tensor, use: bool = False) -> Tensor:
        x = self.body(x).tanh()
        return (self.head(self.maybe(x) if use else x) - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx in (1, 2))
        self.log("train/loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.body.parameters(), "lr": 0.02},
            {"params": [*self.maybe.parameters(), *self.head.parameters()]},
            {"params": self.dead.parameters(), "weight_decay": 0.5},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05, 0.1], total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Growing(Net):
    """A group is added in mid-training, a frozen layer thaws, and a schedule follows the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(6, 6).double()
        self.late.requires_grad_(False)
        self.maybe.requires_grad_(False)

    def loss(self, x: Tensor, use: bool = False) -> Tensor:
        return super().loss(x + self.late(x), True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (1, 1):
            self.maybe.requires_grad_(True)
            self.late.requires_grad_(True)
            self.optimizers(use_pl_optimizer=False).add_param_group(
                {"params": list(self.late.parameters()), "lr": 0.03}
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad([p for n, p in self.named_parameters() if "late" not in n])
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss_epoch"},
        }


class Gan(Net):
    """Two optimizers that take turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, True))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.body.parameters(), lr=0.02, foreach=True),
            torch.optim.SGD([*self.maybe.parameters(), *self.head.parameters()], 0.1, 0.9),
        ]


class ByHand(Net):
    """Several backwards for one step, and a raw optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, True))
        if batch_idx % 2:
            # A raw optimizer does not tell the strategy that it steps.
            raw = self.trainer.strategy.options.manual_sync == "each_backward"
            optimizer = self.optimizers(use_pl_optimizer=not raw)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.02)


class Tensors(Net):
    """An optimizer that needs whole tensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


class Looks(Callback):
    """Keeps the optimizers' whole states, and checks what everybody may see after a step."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.before: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.before = dict(module.named_parameters())

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        now = dict(module.named_parameters())
        for name, parameter in self.before.items():
            assert now[name] is parameter, name
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape, name

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.states = [
            copy.deepcopy(trainer.strategy.optimizer_state(each)) for each in trainer.optimizers
        ]


class Ema(WeightAveraging):
    """The average of every step's weights."""

    def __init__(self) -> None:
        super().__init__(avg_fn=lambda mean, new, _: 0.8 * mean + 0.2 * new)


RUNS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any], Callable[[], list[Callback]]]] = {
    "groups, schedule, clipping": (Net, {}, {"gradient_clip_val": 0.3}, list),
    "clipping by value": (
        Net,
        {},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        list,
    ),
    "window of 3 with a rest": (Net, {}, {"accumulate_grad_batches": 3}, list),
    "every micro-batch": (Net, {"accum_sync": "every"}, {"accumulate_grad_batches": 2}, list),
    "growing": (Growing, {}, {"max_epochs": 3}, list),
    "two optimizers": (Gan, {}, {}, list),
    "by hand": (ByHand, {}, {}, list),
    "by hand, on step": (ByHand, {"manual_sync": "on_step"}, {}, list),
    "whole tensors": (Tensors, {}, {}, list),
    "averaged": (Net, {}, {}, lambda: [Ema()]),
    "swa": (Net, {}, {"max_epochs": 4}, lambda: [StochasticWeightAveraging(0.1, 0.5)]),
}


def _run(
    rank: int, world: int, port: int, name: str, options: dict[str, Any], zero: Any
) -> tuple[dict[str, Tensor], list[Any], int]:
    make, more, trainer_options, callbacks = RUNS[name]
    looks, module = Looks(), make()
    strategy = lean(**{"check_replicas_every_n_steps": 1, "zero": zero, **options, **more})
    fit(
        module,
        rank,
        world,
        port,
        strategy,
        lambda: [*callbacks(), looks],
        **{"max_epochs": 2, **trainer_options},
    )
    return module.state_dict(), looks.states, strategy._engine.zero.state_bytes


def _all_runs(rank: int, world: int, port: int, options: dict[str, Any]) -> None:
    for name in RUNS:
        weights, states, held = _run(rank, world, port, name, options, 1)
        expected, plain, whole = _run(rank, world, port, name, options, 0)
        assert_equal_on_all_ranks(weights)
        assert_same_bytes(weights, expected, name)
        assert held < 0.8 * whole, (name, held, whole)
        if rank == 0:
            assert_same_bytes(states, plain, name)


def _own_gradients(rank: int, world: int, port: int) -> None:
    """Over the process group a rank gets its own slices only; 3 ranks add in another order than a ring."""
    for name in (
        "groups, schedule, clipping",
        "clipping by value",
        "window of 3 with a rest",
        "growing",
    ):
        group = {"shared_memory": False}
        weights, states, held = _run(rank, world, port, name, group, {"gradients": "own"})
        expected, plain, whole = _run(rank, world, port, name, group, 0)
        assert_equal_on_all_ranks(weights)
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
        assert held < 0.8 * whole, (name, held, whole)
        if rank == 0:
            torch.testing.assert_close(states[0]["state"], plain[0]["state"], rtol=1e-8, atol=1e-12)


@both_worlds
def test_z5_z9_z10_own_gradients_only(world_size):
    ranks(_own_gradients, world_size, timeout_s=120)


@both_worlds
def test_z5_z9_z10_z11_z12_z14_the_same_bits_in_a_trainer(world_size):
    ranks(_all_runs, world_size, {}, timeout_s=200)


def _little_memory(rank: int, world: int, port: int) -> None:
    """Slices wait for memory, on one rank longer than on the other."""
    shard.RECEIVE_BYTES = 1
    advance = shard.ShardWire.advance
    if rank == 1:
        shard.ShardWire.advance = lambda self: None if self._reducing else advance(self)
    options = {"shared_memory": False, "bucket_cap_mb": 0.001}
    name = "groups, schedule, clipping"
    weights, _, _ = _run(rank, world, port, name, options, {"gradients": "own"})
    assert_equal_on_all_ranks(weights)


def test_what_is_sent_later_for_want_of_memory_meets_its_own():
    ranks(_little_memory, 2)


def test_control_a_step_that_is_not_gathered_is_found():
    def run(rank: int, world: int, port: int) -> None:
        ParameterGather.run = lambda *_: None
        with pytest.raises(ReplicaMismatchError, match="values differ"):
            _run(rank, world, port, "groups, schedule, clipping", {}, 1)

    ranks(run, 2)


def _traffic(rank: int, world: int, port: int) -> dict[str, Any]:
    """Calls of collectives in a step, and their bytes a parameter and rank, as the interface sends them."""
    sent: dict[str, list[int]] = {}
    for name in ("all_reduce", "all_to_all_single", GATHER):
        original = getattr(dist, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            sent.setdefault(name, []).append(args[0].nbytes)
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    steps: list[dict[str, list[int]]] = []

    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 400), nn.Linear(400, 11))
            self.double()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch, True)

    class Counts(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            sent.clear()

        def on_train_batch_end(self, *_: Any) -> None:
            steps.append({name: list(values) for name, values in sent.items()})

    module = Large()
    options = {"shared_memory": False, "zero": 1, "bucket_cap_mb": 0.5}
    strategy = lean(check_replicas_every_n_steps=0, **options)
    fit(module, rank, world, port, strategy, lambda: [Counts()], accumulate_grad_batches=2)
    used = [p for name, p in module.named_parameters() if "dead" not in name]
    return {"steps": steps, "bytes": sum(p.nbytes for p in used)}


@both_worlds
def test_z3_z4_as_many_bytes_as_an_all_reduce_and_two_collectives_a_bucket(world_size):
    found = ranks(_traffic, world_size)[0]
    inside, last = found["steps"][-2:]
    assert inside == {}  # a micro-batch before the last
    # One small message with flags and control block.
    (small,) = last["all_reduce"]
    assert small < 512
    sent = last["all_to_all_single"], last[GATHER]
    assert len(sent[0]) - 1 == len(sent[1]) > 1  # the layer that nobody uses has not changed
    # Of each, a rank sends all but its own slice: together 2 (K - 1) / K of the parameters' bytes.
    for half in sent:
        assert found["bytes"] <= sum(half) <= 1.02 * found["bytes"] + 4096
