"""Random small modules and random accumulation patterns, each from one seed, the same on every rank."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
QUARTERS = 4
# What a module's layers may be of; "mixed" draws one for each layer.
PRECISIONS: dict[str, tuple[torch.dtype, ...]] = {
    "mixed": (torch.float64, torch.float64, torch.float32, torch.bfloat16),
    "fp32": (torch.float32,),
    "bf16-true": (torch.bfloat16,),
    "16-true": (torch.float16,),
}


class Block(nn.Module):
    """One layer of a drawn module."""

    def __init__(self, draw: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = draw.choice(["linear", "linear", "deep", "complex", "scale", "conv"])
        if self.kind == "complex" and dtype in (torch.bfloat16, torch.float16):
            self.kind = "deep"
        self.checkpointed = draw.choice([None, None, False, True])  # re-entrant or not
        if self.kind == "linear":
            self.layer = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7).to(dtype)
        elif self.kind == "deep":
            self.layer = nn.Sequential(
                nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH, bias=False)
            ).to(dtype)
        elif self.kind == "complex":
            self.phase = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        elif self.kind == "scale":
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        else:
            conv = nn.Conv2d(WIDTH, WIDTH, 1).to(dtype)
            self.layer = conv.to(memory_format=torch.channels_last)

    def compute(self, x: Tensor) -> Tensor:
        """Shape ``(n, WIDTH)`` in and out."""
        if self.kind == "complex":
            return (x.to(torch.complex64) @ self.phase).real.to(x.dtype)
        if self.kind == "scale":
            return (x.to(self.scale.dtype) * self.scale).to(x.dtype)
        dtype = next(self.layer.parameters()).dtype
        if self.kind == "conv":
            return self.layer(x.to(dtype)[:, :, None, None])[:, :, 0, 0].to(x.dtype)
        return self.layer(x.to(dtype)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.checkpointed)


class DrawnNet(nn.Module):
    """Blocks, some of them used only where told, some tied, some rows looked up sparsely."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.precision = draw.choice(["mixed", "mixed", "fp32", "bf16-true", "16-true"])
        dtypes = PRECISIONS[self.precision]
        sparse = draw.random() < 0.5 and dtypes[0] != torch.float16  # torch cannot add those
        self.rows = nn.Embedding(9, WIDTH, sparse=sparse).to(dtypes[0])
        self.blocks = nn.ModuleList(
            Block(draw, draw.choice(dtypes)) for _ in range(draw.randint(2, 6))
        )
        self.optional = [draw.random() < 0.5 for _ in self.blocks]
        self.head = nn.Linear(WIDTH, 2).to(dtypes[0])
        for block in self.blocks:  # the same weight in two layers, or one layer in two places
            linear = [b for b in self.blocks if b.kind == "linear" and b is not block]
            if block.kind == "linear" and linear and draw.random() < 0.4:
                other = draw.choice(linear)
                if other.layer.weight.dtype == block.layer.weight.dtype:
                    block.layer.weight = other.layer.weight
        self.again = draw.choice([None, None, draw.randrange(len(self.blocks))])

    def forward(self, tokens: Tensor, used: list[bool]) -> Tensor:
        x = self.rows(tokens)
        for block, optional, use in zip(self.blocks, self.optional, used, strict=True):
            if use or not optional:
                x = x + block(x.tanh())
        if self.again is not None:
            x = x + self.blocks[self.again](x.tanh())
        return self.head(x).square().mean()


@dataclass
class Micro:
    """One micro-batch of one rank.

    Attributes:
        used: Which optional blocks run.
        weight: What its loss weighs.
        lost: This rank has no loss.
        twice: One forward, two backwards.
        raw: A plain ``loss.backward()``.
        inner: How many backwards of its own the step makes first; they are no reductions.
    """

    used: list[bool]
    weight: float
    lost: bool
    twice: bool
    raw: bool
    inner: int


@dataclass
class Draw:
    """Everything of one draw. ``windows[w][m][r]`` is micro-batch ``m`` of window ``w`` on rank ``r``.

    Attributes:
        shared_memory: Gradients travel through it.
        deferred: Reduced values are read a step late, as on an accelerator.
        kept: Whether the gradients of a window are kept for the next one: no step was made.
        frozen: Which quarter of the parameters is frozen in a window.
        frozen_late: ... from its last micro-batch on, after the others gave it gradients.
        frozen_on: The rank on which alone a quarter of the parameters is frozen in the last window.
        tensor_hooks: Users' hooks on parameters, which double a gradient.
        tune: Buckets are cut anew after a few reductions.
    """

    seed: int
    world_size: int
    weighted: bool = False
    to_none: bool = True
    caps: tuple[int, int, int] = (2048, 512, 512)
    reduce_dtype: torch.dtype | None = None
    hook: bool = False
    every: bool = False
    shared_memory: bool = False
    deferred: bool = False
    windows: list[list[list[Micro]]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    frozen: list[list[bool]] = field(default_factory=list)
    frozen_late: list[list[bool]] = field(default_factory=list)
    frozen_on: int | None = None
    tensor_hooks: bool = False
    tune: bool = False

    def make(self) -> DrawnNet:
        """The module, the same on every rank."""
        torch.manual_seed(self.seed)
        net = DrawnNet(random.Random(self.seed))
        for name, p in net.named_parameters():
            if self.tensor_hooks and sum(name.encode()) % 3 == 0:
                p.register_hook(lambda grad: grad * 2)
        return net

    def apply_freezing(self, module: nn.Module, window: int, micro: int, rank: int) -> None:
        """Freeze and unfreeze before a micro-batch; the head is always trained."""
        late = micro > 0 and micro == len(self.windows[window]) - 1
        alone = self.frozen_on == rank and window == len(self.windows) - 1
        for name, p in module.named_parameters():
            number = sum(name.encode()) % QUARTERS
            frozen = self.frozen[window][number] or (late and self.frozen_late[window][number])
            frozen |= alone and number == self.seed % QUARTERS
            p.requires_grad_(name.startswith("head") or not frozen)

    @property
    def tells_late(self) -> bool:
        """Whether a parameter may fire a second time without having been seen to do so before."""
        net = self.make()
        shared = len({id(p) for b in net.blocks for p in b.parameters()}) < sum(
            len(list(b.parameters())) for b in net.blocks
        )
        reentrant = any(b.checkpointed for b in net.blocks)
        return reentrant and (shared or net.again is not None)


def draw(seed: int, world_size: int) -> Draw:
    """Return draw number ``seed``."""
    random_ = random.Random(seed)
    blocks = len(DrawnNet(random.Random(seed)).blocks)
    result = Draw(
        seed=seed,
        world_size=world_size,
        weighted=random_.random() < 0.4,
        to_none=random_.random() < 0.8,
        caps=random_.choice([(300, 100, 100), (2048, 512, 512), (10**7, 10**6, 10**6)]),
        reduce_dtype=random_.choice([None, None, torch.float32]),
        hook=random_.random() < 0.2,
        shared_memory=random_.random() < 0.5,
        deferred=random_.random() < 0.5,
        frozen_on=random_.randrange(world_size) if random_.random() < 0.2 else None,
        tensor_hooks=random_.random() < 0.2,
        tune=random_.random() < 0.3,
    )
    result.every = not result.weighted and random_.random() < 0.2
    result.frozen.append([False] * QUARTERS)  # something must be trainable at the start
    for _ in range(random_.randint(2, 5)):
        result.frozen.append([random_.random() < 0.2 for _ in range(QUARTERS)])
        result.frozen_late.append([random_.random() < 0.05 for _ in range(QUARTERS)])
        # In mid-window it is only known of a backward that the strategy runs.
        late = any(result.frozen_late[-1])
        # A window's division is by its own weights, so what is kept must not be weighted.
        result.kept.append(not result.weighted and random_.random() < 0.2)
        micros: list[Any] = []
        for _ in range(random_.choice([1, 1, 2, 3])):
            # Weights belong to automatic optimization, where a micro-batch has one backward.
            twice = random_.random() < 0.1 and not result.weighted
            together = {"twice": twice, "raw": random_.random() < 0.3 and not late}
            micros.append(
                [
                    Micro(
                        used=[random_.random() < 0.6 for _ in range(blocks)],
                        weight=random_.choice([0.0, 1.0, 1.0, 3.0, 5.5]),
                        lost=random_.random() < 0.1,
                        inner=random_.choice([0, 0, 0, 1, 2]),
                        **together,
                    )
                    for _ in range(world_size)
                ]
            )
        result.windows.append(micros)
    return result
