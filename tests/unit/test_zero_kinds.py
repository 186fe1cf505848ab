"""How an optimizer's work can be divided: which classes are known, and what the probe finds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.optim.kinds import Sharding, judge
from tests.multi_process.optim.test_step_bits import CLASSES


class Lamb(Optimizer):
    """Scales each tensor's step by the ratio of two norms; the name is a known one."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    p.sub_(mean * (group["lr"] * p.norm() / (mean.norm() + 1e-8)))


class Global(Optimizer):
    """Its rate follows the norm of all gradients, and is kept in the group."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        used = [p for p in group["params"] if p.grad is not None]
        group["d"] += float(sum(p.grad.square().sum() for p in used))
        for p in used:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p.sub_(mean.mul_(0.9).add_(p.grad), alpha=group["lr"] / group["d"])


class MyAdamW(torch.optim.AdamW):
    """A subclass: nobody knows what it changes."""


def parameters() -> list[nn.Parameter]:
    return list(nn.Linear(20, 30).parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_torch_are_cut_into_slices(name):
    optimizer = getattr(torch.optim, name)(parameters(), **CLASSES[name])
    assert judge(optimizer).sharding is Sharding.SLICES
    assert judge(optimizer, slices=False).sharding is Sharding.TENSORS


def test_the_optimizer_its_parameters_and_random_numbers_are_left_alone():
    optimizer = torch.optim.Adagrad(parameters(), lr=torch.tensor(0.1))
    before = {p: p.detach().clone() for p in optimizer.param_groups[0]["params"]}
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    random = torch.get_rng_state()
    assert judge(optimizer).sharding is Sharding.SLICES
    assert torch.equal(torch.get_rng_state(), random)
    assert calls == []
    for parameter, value in before.items():
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        assert float(optimizer.state[parameter]["step"]) == 0
        assert not optimizer.state[parameter]["sum"].any()


@pytest.mark.parametrize("cls", [Lamb, torch.optim.Adafactor])
def test_whole_tensors_where_a_part_would_be_another_step(cls):
    assert judge(cls(parameters())).sharding is Sharding.TENSORS


@pytest.mark.parametrize(
    ("optimizer", "split", "reason"),
    [
        (torch.optim.LBFGS(parameters()), (), "not known"),
        (MyAdamW(parameters()), (), "say zero={'split': ['MyAdamW']}"),
        (Global(parameters()), ("Global",), "depends on the others"),
        (torch.optim.SGD(parameters(), 0.1), (), "no memory to save"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_replicated_and_why(optimizer, split, reason):
    verdict = judge(optimizer, split)
    assert verdict.sharding is Sharding.REPLICATED
    assert reason in verdict.reason


def test_a_class_that_the_user_names_is_asked_as_well():
    assert judge(MyAdamW(parameters()), ["MyAdamW"]).sharding is Sharding.SLICES


def test_control_one_group_of_two_decides():
    # Without momentum in one group there is still a state in the other.
    first, second = parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.9}, {"params": [second]}]
    assert judge(torch.optim.SGD(groups, 0.1)).sharding is Sharding.SLICES


def test_an_optimizer_that_raises_on_a_small_tensor_stays_whole():
    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("not this one")

    verdict = judge(Picky(parameters(), 0.1, 0.9), ["Picky"])
    assert verdict.sharding is Sharding.REPLICATED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "could not be tried" in verdict.reason


def test_state_kept_elsewhere_than_in_tensors_of_the_parameter_is_not_cut():
    class Lists(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    kept: list[Tensor] = self.state[p].setdefault("kept", [])
                    kept.append(p.grad.clone())
                    p.sub_(kept[0])

    assert judge(Lists(parameters(), 0.1), ["Lists"]).sharding is Sharding.TENSORS
