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
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.registry import buffer_owners
from lightning_dp.engine.replicas import start as replicas
from lightning_dp.engine.replicas.packing import plain_parts
from lightning_dp.errors import some_names
from lightning_dp.internals.autograd import NORM_LAYERS, version_of

log = logging.getLogger(__name__)

SAMPLE = 64  # elements of a buffer that are compared
SAMPLED_FIRST = 8  # in each of the first windows,
SAMPLED_EVERY = 16  # and then in every 16th


class Seen(NamedTuple):
    """What a buffer was when it was last looked at."""

    identity: int
    version: int
    shape: torch.Size
    sample: Tensor


class BufferKeeper:
    """Keeps one module's buffers equal over replicas.

    Args:
        module: The user's module.
        group: Who takes part.
        mode: ``"lazy"`` as above; ``"step"`` sends every buffer before each step; ``"none"`` never
            touches any after the start.
        reduce: How statistics become equal: rank 0's (``"broadcast"``, as DDP) or their ``"mean"``.
        left_alone: Names of buffers that each rank keeps for itself, equal on all ranks
            (``replicas.synchronize``). Caches that change their size join them.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ReplicaGroup,
        mode: str = "lazy",
        reduce: str = "broadcast",
        left_alone: Iterable[str] = (),
    ) -> None:
        self.module = module
        self.group = group
        self.mode = mode
        self.reduce = reduce
        self.active = group.world_size > 1 and mode != "none"
        self._left_alone = set(left_alone)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._statistics: list[str] = []
        self._each_step: list[str] = []
        self._watched: list[str] = []  # neither statistics nor sent at each step
        self._seen: dict[str, Seen] = {}
        self._windows = 0
        self._dirty = False
        self._look_again = False
        self.refresh()
        if self.mode == "step":
            self._sort(self._places)

    def refresh(self) -> None:
        """Look which buffers the module has: some appear later, with new layers or pruning masks."""
        if not self.active:
            return
        before = self._places
        self._places = {
            name: place
            for name, place in sorted(buffer_owners(self.module).items())
            if name not in self._left_alone
        }
        self._sort(self._each_step)
        new = self._places.keys() - before
        self._remember(new.difference(self._statistics))

    def _sort(self, each_step: Iterable[str]) -> None:
        self._each_step = sorted(name for name in set(each_step) if name in self._places)
        self._statistics = [n for n, (o, _) in self._places.items() if isinstance(o, NORM_LAYERS)]
        others = set(self._places).difference(self._statistics, self._each_step)
        self._watched = sorted(others)

    def _tensors(self, names: Iterable[str]) -> list[Tensor]:
        return [tensor for name in names if (tensor := self._tensor(name)) is not None]

    def _tensor(self, name: str) -> Tensor | None:
        owner, key = self._places[name]
        tensor = getattr(owner, key, None)
        return tensor if isinstance(tensor, Tensor) else None

    def _remember(self, names: Iterable[str]) -> None:
        for name in names:
            tensor = self._tensor(name)
            if tensor is not None:
                self._seen[name] = Seen(
                    id(tensor), version_of(tensor), tensor.shape, _sample(tensor)
                )

    def changed(self) -> list[str]:
        """Names of buffers, other than statistics, that changed since they were last looked at.

        Never waits for an accelerator: what only ``sampled_difference`` shows is left out there.
        """
        if not self.active:
            return []
        self._dirty = True
        self._windows += 1
        names = [n for n in self._watched if self.mode == "step" or self._has_changed(n)]
        names += [name for name in self._each_step if self._is_resized(name)]
        if self.group.host_reads_are_free and self._sampled:
            names += self._differing()
        return names

    def _has_changed(self, name: str) -> bool:
        tensor, seen = self._tensor(name), self._seen.get(name)
        if tensor is None or seen is None:
            return tensor is not None
        return (id(tensor), version_of(tensor)) != seen[:2]

    def _is_resized(self, name: str) -> bool:
        tensor, seen = self._tensor(name), self._seen.get(name)
        return tensor is not None and seen is not None and tensor.shape != seen.shape

    @property
    def _sampled(self) -> bool:
        return self._windows <= SAMPLED_FIRST or self._windows % SAMPLED_EVERY == 0

    def sampled_difference(self) -> Tensor | float:
        """Whether samples of buffers changed, where the host should not wait for the answer.

        Returns:
            Shape ``()``, bool, on the group's device, for the control block; 0 in windows that are not
            sampled, and where ``changed`` has looked already.
        """
        if not self.active or self.group.host_reads_are_free or not self._sampled:
            return 0.0
        pairs = self._samples()
        if not pairs:
            return 0.0
        now, before = (torch.cat(samples) for samples in zip(*pairs.values(), strict=True))
        return (now != before).any()

    def _samples(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name: now and before, of buffers that are what they were but for their values."""
        device = self.group.device
        return {
            name: (_sample(tensor).to(device), self._seen[name].sample.to(device))
            for name in self._watched
            if (tensor := self._tensor(name)) is not None and not self._has_changed(name)
        }

    def _differing(self) -> list[str]:
        pairs = self._samples().items()
        return [name for name, (now, before) in pairs if not torch.equal(now, before)]

    def learn(self, changed: Iterable[str]) -> None:
        """Agree on buffers that change in training; send them before each step from now on.

        A non-persistent one that changes its size (a cache) is each rank's own affair from now on.

        Raises:
            ReplicaMismatchError: Ranks have other buffers by now.

        Collective: every rank, when any rank saw a change. Blocks.
        """
        self._agree({*changed, *self._differing()})

    def _agree(self, changed: set[str]) -> None:
        buffers = replicas.describe_buffers(self.module)
        resized = {b.name for b in buffers if b.name in self._places and self._is_resized(b.name)}
        everyone = self.group.all_gather_object((changed, resized, buffers))
        unequal = replicas.unequal_caches([theirs for _, _, theirs in everyone], self.group.rank)
        resized = set().union(*(theirs for _, theirs, _ in everyone))
        caches = unequal | {b.name for b in buffers if b.cached and b.name in resized}
        replicas.warn_left_alone(caches - self._left_alone, replicas.CACHES_DIFFER, self.group)
        self._left_alone |= caches
        for name in caches & self._places.keys():
            del self._places[name]
        new = set().union(*(theirs for theirs, _, _ in everyone)).intersection(self._watched)
        new &= self._places.keys()
        self._sort([*self._each_step, *new])
        self._remember(self._each_step)
        if self.group.rank == 0 and new:
            log.info(
                "lean_ddp: training changes buffer(s) %s, which are not running statistics. They are"
                " now sent from rank 0 before every step.",
                some_names(sorted(new)),
            )

    def note_forward(self) -> None:
        """A forward of training follows, which may write statistics. Local."""
        self._dirty = True

    def before_step(self) -> None:
        """Before a window's first forward: make equal what the graph will read.

        Collective: every rank, once per window; nothing at all for modules without such buffers.
        Blocks (on CUDA: the stream only).
        """
        if not self.active:
            return
        self.note_forward()  # also without a backward
        if self._look_again:
            # What an evaluation or a checkpoint changed (weights swapped in and out) is not training's.
            self._look_again = False
            if self._each_step:
                self._agree(set())  # sizes may have changed
            self._remember(self._watched)
        if self._each_step:
            replicas.broadcast(self._tensors(self._each_step), self.group)

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
            self.learn(self.changed())
            self._dirty = False
        averaged = [n for n in self._statistics if self.reduce == "mean" and self._is_floating(n)]
        sent = {*self._statistics, *self._each_step}.difference(averaged)
        replicas.broadcast(self._tensors(sorted(sent)), self.group)
        tensors = self._tensors(averaged)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            self._average([tensor for tensor in tensors if tensor.dtype == dtype])

    def _is_floating(self, name: str) -> bool:
        tensor = self._tensor(name)
        return tensor is not None and tensor.is_floating_point()

    def _average(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1).to(self.group.device) for tensor in tensors])
        self.group.all_reduce_mean(flat)
        for tensor, part in zip(
            tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True
        ):
            tensor.detach().copy_(part.view(tensor.shape))


def _sample(tensor: Tensor) -> Tensor:
    """Copy a few elements, evenly spaced, as bytes: a NaN is equal to itself then."""
    samples = [torch.empty(0, dtype=torch.uint8, device=tensor.device)]
    for part in plain_parts(tensor) or ():
        flat = part.resolve_conj().resolve_neg().reshape(-1)
        few = flat[:: max(1, flat.numel() // SAMPLE)]
        samples.append(few.clone(memory_format=torch.contiguous_format).view(torch.uint8))
    return torch.cat(samples)
