"""Buffers: equal when they matter, without a broadcast in every forward.

Three kinds, by what training does with them:

* statistics (BatchNorm's running mean and variance): written in training, read only in evaluation. They
  are made equal before they are consumed: evaluation, checkpoints, weight averaging.
* constants (rotary tables, masks): equal since the start.
* state that the graph reads and training changes (VQ codebooks, spectral norm): must be equal at every
  forward. They are recognised by having changed, and from then on sent once per step.

[Note: why not in every forward] Overwriting a buffer between a forward and its backward changes values
that autograd saved. Torch's DDP hides that from the version counter, and the gradient is silently
wrong. Here a buffer is only overwritten before the first forward of a window, and visibly: a graph that
still needs the old value raises.

[Note: three ways to change a buffer] In place (its version counts up), by assigning another tensor to
its name (another object), and through ``.data``, as many codebooks are written, which leaves both
unchanged: for that a few elements of each buffer are compared now and then.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.errors import ReplicaMismatchError, some_names
from lightning_dp.internals.autograd import NORM_LAYERS, ignored_names, version_of

log = logging.getLogger(__name__)

SAMPLE = 64  # elements of a buffer that are compared
SAMPLED_FIRST = 8  # in each of the first windows,
SAMPLED_EVERY = 16  # and then in every 16th


class Seen(NamedTuple):
    """What a buffer was when it was last looked at."""

    identity: int
    version: int
    sample: Tensor


class BufferKeeper:
    """Keeps one module's buffers equal over replicas.

    Args:
        module: The user's module.
        group: Who takes part.
        mode: ``"lazy"`` as above; ``"step"`` sends every buffer before each step; ``"none"`` never
            touches any after the start.
        reduce: How statistics become equal: rank 0's (``"broadcast"``, as DDP) or their ``"mean"``.
    """

    def __init__(
        self, module: nn.Module, group: ReplicaGroup, mode: str = "lazy", reduce: str = "broadcast"
    ) -> None:
        self.module = module
        self.group = group
        self.mode = mode
        self.reduce = reduce
        self.active = group.world_size > 1 and mode != "none"
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._statistics: list[str] = []
        self._others: list[str] = []
        self._each_step: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._windows = 0
        self._dirty = False
        self._look_again = False
        self.refresh()

    def refresh(self) -> None:
        """Look which buffers the module has: some appear later, with new layers or pruning masks.

        Names are kept, not tensors: an assignment (``self.table = new``) replaces the tensor.
        """
        if not self.active:
            return
        ignored = ignored_names(self.module)
        places: dict[str, tuple[nn.Module, str]] = {}
        known: set[int] = set()
        for prefix, owner in self.module.named_modules():
            for key, tensor in owner.named_buffers(recurse=False):
                name = f"{prefix}.{key}" if prefix else key
                if name not in ignored and id(tensor) not in known:
                    known.add(id(tensor))
                    places[name] = owner, key
        new = [name for name in places if name not in self._places]
        self._places = places
        self._statistics = [n for n, (owner, _) in places.items() if isinstance(owner, NORM_LAYERS)]
        self._others = [n for n in places if n not in self._statistics]
        if self.mode == "step":
            self._each_step = list(places)
        else:
            self._each_step = [n for n in self._each_step if n in places]
        self._remember([name for name in new if name in self._others])

    def _tensors(self, names: list[str]) -> list[Tensor]:
        return [tensor for name in names if (tensor := self._tensor(name)) is not None]

    def _tensor(self, name: str) -> Tensor | None:
        owner, key = self._places[name]
        tensor = getattr(owner, key, None)
        return tensor if isinstance(tensor, Tensor) else None

    def _remember(self, names: list[str]) -> None:
        for name in names:
            tensor = self._tensor(name)
            if tensor is not None:
                self._seen[name] = Seen(id(tensor), version_of(tensor), _sample(tensor))

    def changed(self) -> list[str]:
        """Names of buffers, other than statistics, that changed since they were last looked at.

        Cheap: two comparisons of integers a buffer, and most modules have none of this kind.
        """
        if not self.active:
            return []
        self._dirty = True
        self._windows += 1
        sampled = self._windows <= SAMPLED_FIRST or self._windows % SAMPLED_EVERY == 0
        return [
            name
            for name in self._others
            if name not in self._each_step and self._has_changed(name, sampled=sampled)
        ]

    def _has_changed(self, name: str, *, sampled: bool) -> bool:
        tensor, seen = self._tensor(name), self._seen.get(name)
        if tensor is None or seen is None:
            return tensor is not None
        if (id(tensor), version_of(tensor)) != seen[:2]:
            return True
        return sampled and not torch.equal(_sample(tensor), seen.sample)

    def learn(self, changed: list[str]) -> None:
        """Agree on buffers that change in training; send them before each step from now on.

        Raises:
            ReplicaMismatchError: Ranks have other buffers by now.

        Collective: every rank, when any rank saw a change. Blocks.
        """
        everyone = self.group.all_gather_object((changed, self._describe()))
        ranks = [rank for rank, (_, other) in enumerate(everyone) if other != everyone[0][1]]
        if ranks:
            names = sorted(set(everyone[0][1]) ^ set(everyone[ranks[0]][1]))
            raise ReplicaMismatchError(
                f"[rank {self.group.rank}] buffers differ between rank 0 and rank(s) {ranks}:"
                f" {some_names(names)}. Add, remove and resize the same buffers on every rank.",
                names=names,
                ranks=ranks,
            )
        new = [name for name in self._others if any(name in names for names, _ in everyone)]
        self._each_step += [name for name in new if name not in self._each_step]
        if self.group.rank == 0 and new:
            log.info(
                "lean_ddp: training changes buffer(s) %s, which are not running statistics. They are"
                " now sent from rank 0 before every step.",
                some_names(new),
            )

    def _describe(self) -> list[str]:
        found = ((name, self._tensor(name)) for name in self._places)
        return [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in found if t is not None]

    def before_step(self) -> None:
        """Before a window's first forward: make equal what the graph will read.

        Collective: every rank, once per window; nothing at all for modules without such buffers.
        Blocks (on CUDA: the stream only).
        """
        if not self.active:
            return
        self._dirty = True  # the forward that follows may write statistics, also without a backward
        if self._each_step:
            replicas.broadcast(self._tensors(self._each_step), self.group)
        if self._look_again:
            # What an evaluation or a checkpoint changed (weights swapped in and out) is not training's.
            self._look_again = False
            self._remember([name for name in self._others if name not in self._each_step])

    def before_use(self, *, between_steps: bool = False) -> None:
        """Before statistics are read (evaluation, checkpoint, averaging): make all buffers equal.

        Args:
            between_steps: Training goes on at once (weight averaging after each step): what changes
                until the next step is still training's.

        Collective: every rank. Nothing if no training step ran since the last time. Blocks.
        """
        if not self.active or not self._dirty:
            return
        self._dirty = False
        if not between_steps:
            self._look_again = True
            self.refresh()
            if self._places and self.mode == "lazy":
                self.learn(self.changed())
                self._dirty = False
        mean = [n for n in self._statistics if self.reduce == "mean" and self._is_floating(n)]
        sent = [n for n in self._statistics if n not in mean]
        sent += [n for n in self._each_step if n not in self._statistics]
        replicas.broadcast(self._tensors(sent), self.group)
        averaged = self._tensors(mean)
        for dtype in dict.fromkeys(tensor.dtype for tensor in averaged):
            self._average([tensor for tensor in averaged if tensor.dtype == dtype])

    def _is_floating(self, name: str) -> bool:
        tensor = self._tensor(name)
        return tensor is not None and tensor.is_floating_point()

    def _average(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self.group.all_reduce_mean(flat)
        for tensor, part in zip(
            tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True
        ):
            tensor.detach().copy_(part.view(tensor.shape))


def _sample(tensor: Tensor) -> Tensor:
    """Copy a few elements, evenly spaced, as bytes: a NaN is equal to itself then."""
    flat = tensor.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // SAMPLE)]
    few = torch.view_as_real(few.resolve_conj()) if few.is_complex() else few
    return few.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
