"""Small modules of plain torch, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook


def net(n: int = 4) -> nn.Module:
    """``n`` linear layers of width 8 in float64."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(n)]).double()


def data(n: int = 4, width: int = 8, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``n`` rows of noise."""
    return torch.randn(n, width, dtype=dtype)


class Branches(nn.Module):
    """``maybe`` is used where the caller says so, ``dead`` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.maybe = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dead, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.maybe(x) if use else x)


def branches() -> nn.Module:
    """``Branches`` in float64."""
    return Branches().double()


class Wide(nn.Module):
    """Matrices that a compressing hook compresses, in several buckets; its output is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
        self.maybe = nn.Linear(32, 32)
        self.dead = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = self.body(x)
        return (self.maybe(x) if use else x).square().mean()


def power_sgd(_group: Any = None, **options: Any) -> powerSGD_hook.PowerSGDState:
    """A state that compresses from the second step on."""
    defaults = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    return powerSGD_hook.PowerSGDState(None, **{**defaults, **options})


class Boom(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom in backward")
