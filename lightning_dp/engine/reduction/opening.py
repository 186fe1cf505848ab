"""What ranks compare before the first bucket of a reduction leaves, where it may differ.

[Note: buckets that meet by accident] Which buckets leave is each rank's own decision: those with a
trainable parameter. Ranks that decide differently would add up other layers, or wait for ever. Usually
nothing has changed since the last reduction and the decision is known to be common. Where something has
(a toggled half of a GAN, a layer frozen), the ranks compare first, in one small message beside the
backward; no bucket leaves before it is there. A rank on which something changed while nothing did on the
others waits there, and they wait for its gradients: two waits of different kinds, which the watchdog
tells apart from a slow network.

On an accelerator every reduction has an opening: what the host must know in this step and not in the next
one (whether weights are equal, whether parameters are new) is then known without reading the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.control import step_signs
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.errors import ReplicaMismatchError, some_names

_LIVE_BITS = 24


class Opening:
    """One small all-reduce on the CPU, started when a reduction opens.

    Args:
        group: Who takes part.
        step: Number of the batch that runs.
        live: Numbers of the buckets that this rank is going to send, in launch order.
        weight: This rank's sum of weights; one on a device counts as unknown.
        new: Whether this rank has a trainable parameter without a bucket.
        stop: Whether this rank asks to stop.

    Attributes: known when it was waited for.
        differs: Whether ranks are at other steps or would send other buckets.
        mean_weight: The ranks' mean of their sums of weights; ``None`` if some rank's is on its device.
        new: Whether some rank has a trainable parameter without a bucket.
        stop: Whether some rank asks to stop.

    Collective: every rank. Does not block.
    """

    differs: bool
    mean_weight: float | None
    new: bool
    stop: bool

    def __init__(
        self,
        group: ReplicaGroup,
        step: int,
        live: Sequence[int],
        weight: Tensor | float,
        *,
        new: bool,
        stop: bool,
    ) -> None:
        known = not isinstance(weight, Tensor)
        numbers = [float(weight) if known else 0.0, float(not known), float(new), float(stop)]
        bits = zlib.crc32(repr(list(live)).encode())
        numbers += step_signs(step).values()
        numbers += [1.0 if bits >> bit & 1 else -1.0 for bit in range(_LIVE_BITS)]
        self._values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._world_size = group.world_size
        self._work: Any = dist.all_reduce(self._values, group=group.control_group, async_op=True)
        self._is_read = False

    def is_completed(self) -> bool:
        """Whether all ranks have opened. Does not block."""
        if not self._is_read and self._work.is_completed():
            self.wait()
        return self._is_read

    def wait(self) -> None:
        """Return when all ranks have opened. Collective: completes it. Blocks; can be interrupted."""
        if self._is_read:
            return
        interruptible_wait(self._work)
        weight, on_device, new, stop, *signs = (self._values / self._world_size).tolist()
        self.differs = any(abs(sign) < 1 - 1e-9 for sign in signs)
        self.mean_weight = None if on_device > 0 else weight
        self.new, self.stop = new > 0, stop > 0
        self._is_read = True


def raise_mismatch(group: ReplicaGroup, step: int, frozen: Sequence[str]) -> None:
    """Say on every rank how the ranks' reductions differ.

    Args:
        group: Who takes part.
        step: Number of the batch that runs here.
        frozen: Names of this rank's parameters that have a bucket and are not trainable.

    Raises:
        ReplicaMismatchError: Always.

    Collective: every rank, once all know that they differ. Blocks.
    """
    everyone: list[tuple[int, list[str]]] = group.all_gather_object((step, list(frozen)))
    steps = [other for other, _ in everyone]
    prefix = f"[rank {group.rank}] gradients of different backwards met: "
    if len(set(steps)) > 1:
        by_rank = ", ".join(f"rank {rank} at batch {other}" for rank, other in enumerate(steps))
        raise ReplicaMismatchError(
            f"{prefix}{by_rank}. The ranks made different numbers of backwards that average gradients. Make"
            " the same number on every rank, or use trainer.strategy.accumulate() for the others.",
            ranks=tuple(rank for rank, other in enumerate(steps) if other != steps[0]),
        )
    first = set(everyone[0][1])
    ranks = tuple(rank for rank, (_, other) in enumerate(everyone) if set(other) != first)
    names = sorted(set().union(*(first ^ set(everyone[rank][1]) for rank in ranks)))
    masks = "; ".join(
        f"on rank {rank} frozen: {some_names(sorted(set(other) & set(names))) or 'none'}"
        for rank, (_, other) in enumerate(everyone)
    )
    raise ReplicaMismatchError(
        f"{prefix}requires_grad differs between ranks for {some_names(names)} ({masks}). Freeze and"
        " unfreeze the same parameters at the same step on every rank.",
        names=names,
        ranks=ranks,
    )
