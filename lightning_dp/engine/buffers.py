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
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_dp.engine import replicas
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.registry import named_buffers
from lightning_dp.errors import some_names

log = logging.getLogger(__name__)


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
        self.group = group
        self.mode = mode
        self.reduce = reduce
        self.active = group.world_size > 1 and mode != "none"
        self._buffers = named_buffers(module)
        statistics = {
            f"{prefix}.{name}" if prefix else name
            for prefix, child in module.named_modules()
            if isinstance(child, _NormBase)
            for name, _ in child.named_buffers(recurse=False)
        }
        self._statistics = [n for n in self._buffers if n in statistics]
        self._others = [n for n in self._buffers if n not in statistics]
        self._each_step = list(self._buffers) if mode == "step" else []
        self._versions: dict[str, int] = {}
        self._dirty = False
        self.note_versions()

    def note_versions(self) -> None:
        """Remember the state of buffers that should not change."""
        self._versions = {name: self._buffers[name]._version for name in self._others}

    def changed(self) -> list[str]:
        """Names of buffers, other than statistics, that changed since they were last looked at.

        Cheap: one integer comparison a buffer, and most modules have none of this kind.
        """
        if not self.active or self.mode == "step":
            return []
        self._dirty = True
        return [
            name
            for name, version in self._versions.items()
            if self._buffers[name]._version != version and name not in self._each_step
        ]

    def learn(self, changed: list[str]) -> None:
        """Agree on buffers that change in training; send them before each step from now on.

        Collective: every rank, when any rank saw a change. Blocks.
        """
        everyone = self.group.all_gather_object(changed)
        new = [name for name in self._others if any(name in names for names in everyone)]
        self._each_step += new
        if self.group.rank == 0 and new:
            log.info(
                "lean_ddp: training changes buffer(s) %s, which are not running statistics. They are"
                " now sent from rank 0 before every step.",
                some_names(new),
            )

    def before_step(self) -> None:
        """Before a window's first forward: make equal what the graph will read.

        Collective: every rank, once per window; nothing at all for modules without such buffers.
        Blocks (on CUDA: the stream only).
        """
        if self._each_step and self.active:
            replicas.broadcast([self._buffers[name] for name in self._each_step], self.group)
            self.note_versions()

    def before_use(self) -> None:
        """Before statistics are read (evaluation, checkpoint, averaging): make all buffers equal.

        Collective: every rank. Nothing if no training step ran since the last time. Blocks.
        """
        if not self.active or not self._dirty:
            return
        self._dirty = False
        floating = [
            n
            for n in self._statistics
            if self._buffers[n].is_floating_point() and self.reduce == "mean"
        ]
        rest = [n for n in self._buffers if n not in floating]
        replicas.broadcast([self._buffers[name] for name in rest], self.group)
        for dtype in dict.fromkeys(self._buffers[name].dtype for name in floating):
            self._average([self._buffers[n] for n in floating if self._buffers[n].dtype == dtype])
        self.note_versions()

    def _average(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self.group.all_reduce_mean(flat)
        for tensor, part in zip(
            tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True
        ):
            tensor.detach().copy_(part.view(tensor.shape))
