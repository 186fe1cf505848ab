"""torch's DDP communication hooks, unmodified, on every backend.

A hook is ``(state, bucket) -> Future[Tensor]`` where ``bucket`` answers like ``dist.GradBucket``. Any
callable will do (``functools.partial`` and Hydra's ``_partial_`` too: nothing reads its name).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wire import Done, InFlight
from lightning_dp.errors import ConfigError

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]

# Hooks of torch that cannot work, and why; refused before the first step instead of in it.
_REFUSED: dict[str, tuple[bool, str]] = {
    # name: (only on gloo, reason)
    "batched_powerSGD_hook": (
        False,
        "torch's own implementation orthogonalises a 2-D matrix with a routine for 3-D ones and raises;"
        " use powerSGD_hook",
    ),
    "quantization_pertensor_hook": (True, "it gathers a type that gloo cannot send; use NCCL"),
    "quantization_perchannel_hook": (True, "it gathers a type that gloo cannot send; use NCCL"),
}


class BucketView:
    """What a hook sees of a bucket: the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        bucket.allocate()
        self._buffer = bucket.grads

    def index(self) -> int:
        """Its number, equal on all ranks and stable over steps."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Local gradients, flat: shape ``(numel,)``. Flags are not part of it."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace what ``buffer`` returns."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """One tensor a parameter, in the shape of the parameter, views of ``buffer``."""
        bucket = self._bucket
        shapes = zip(bucket.slots, bucket.offsets, strict=True)
        return [
            self._buffer[offset : offset + slot.numel].view(
                (*slot.param.shape, 2) if slot.param.is_complex() else slot.param.shape
            )
            for slot, offset in shapes
        ]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of ``gradients``."""
        return [slot.param for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether no bucket of this step comes after it."""
        return self._is_last


class _HookResult:
    def __init__(self, future: torch.futures.Future[Tensor], bucket: Bucket) -> None:
        self._future = future
        self._bucket = bucket

    def wait(self) -> None:
        result = self._future.wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        target = self._bucket.grads
        if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
            target.copy_(result.view(-1))  # compressing wrappers return the compressed type


class CommHookWire:
    """Sends each bucket through a communication hook.

    [Note: hooks on gloo] gloo completes futures on threads of its own, so a hook that starts a second
    collective from ``.then`` (PowerSGD) would start it whenever its first one happens to finish, in an
    order that differs between ranks: mismatched collectives, and the process aborts. Where futures
    complete off the caller's thread, a hook is therefore waited for before the next begins.
    """

    carries_flags = False

    def __init__(
        self,
        group: ReplicaGroup,
        hook: CommHook,
        state: Any = None,
        wrapper: Callable[[CommHook], CommHook] | None = None,
    ) -> None:
        self.state = state
        self.hook = wrapper(hook) if wrapper is not None else hook
        self.serialize = group.device.type == "cpu"
        self.last_index = -1
        name = getattr(getattr(hook, "func", hook), "__name__", "")
        only_gloo, reason = _REFUSED.get(name, (False, ""))
        if reason and (self.serialize or not only_gloo):
            raise ConfigError(f"ddp_comm_hook={name} cannot work here: {reason}.")

    def launch(self, bucket: Bucket) -> InFlight:
        """Run the hook on ``bucket``.

        Collective: whatever the hook does; every rank, in launch order. Blocks on gloo only.
        """
        view = BucketView(bucket, is_last=bucket.index == self.last_index)
        result = _HookResult(self.hook(self.state, view), bucket)
        if not self.serialize:
            return result
        result.wait()
        return Done()
