"""torch's DDP communication hooks, unmodified, on every backend.

A hook is ``(state, bucket) -> Future[Tensor]`` where ``bucket`` answers like ``dist.GradBucket``. Any
callable will do (``functools.partial`` and Hydra's ``_partial_`` too: nothing reads its name).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires.comm_hook_state import by_bucket, forget
from lightning_dp.engine.wires.wire import Done, InFlight, Wire
from lightning_dp.errors import ConfigError

log = logging.getLogger(__name__)

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

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
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
        return self._bucket.is_last


@dataclass
class _HookResult:
    future: torch.futures.Future[Tensor]
    bucket: Bucket
    then: Callable[[Bucket], None] | None

    def wait(self) -> None:
        result = self.future.wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        target = self.bucket.grads
        if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
            target.copy_(result.view(-1))  # compressing wrappers return the compressed type
        if self.then is not None:
            self.then(self.bucket)


class CommHookWire(Wire):
    """Sends each bucket through a communication hook.

    [Note: hooks on gloo] gloo completes futures on threads of its own, so a hook that starts a second
    collective from ``.then`` (PowerSGD) would start it whenever its first one happens to finish, in an
    order that differs between ranks: mismatched collectives, and the process aborts. Where futures
    complete off the caller's thread, a hook is therefore waited for before the next begins.

    [Note: a poisoned error feedback] PowerSGD adds last step's error to this step's gradient. Under a loss
    scaler an overflow is ordinary and its step is skipped, but the NaN stays in the error and in the
    warm-started factors, and every later gradient is NaN. With ``heal``, what a hook remembers of a
    bucket is forgotten when it is not finite.

    Args:
        group: Who takes part. Hooks and states of torch that name no process group get this one, so that
            a user's collectives on the default group cannot be paired with a bucket.
        hook: Any callable ``(state, bucket) -> Future``.
        state: Its first argument.
        wrapper: Wraps the hook (``fp16_compress_wrapper``).
        heal: Whether a loss scaler skips steps that are not finite.
    """

    carries_control = False
    keyed_by_bucket = True

    def __init__(
        self,
        group: ReplicaGroup,
        hook: CommHook,
        state: Any = None,
        wrapper: Callable[[CommHook], CommHook] | None = None,
        *,
        heal: bool = False,
    ) -> None:
        self.hook = wrapper(hook) if wrapper is not None else hook
        self.serialize = group.waits_on_host
        self.heal = heal
        plain = getattr(hook, "func", hook)
        name = getattr(plain, "__name__", "")
        only_gloo, reason = _REFUSED.get(name, (False, ""))
        if reason and (self.serialize or not only_gloo):
            raise ConfigError(f"ddp_comm_hook={name} cannot work here: {reason}.")
        of_torch = getattr(plain, "__module__", "").startswith(default_hooks.__package__ or "?")
        if state is None and getattr(plain, "__module__", "") == default_hooks.__name__:
            state = group.process_group  # what these hooks call their state
        self.state = state
        self._lent_group = of_torch and getattr(state, "process_group", ...) is None
        if self._lent_group:
            state.process_group = group.process_group

    def forget(self) -> None:
        """The buckets are others than those of the checkpoint: what was kept of each begins empty."""
        log.warning(
            "lean_ddp: the buckets of this run differ from those of the checkpoint (parameters, dtypes or"
            " what is trainable changed). What the communication hook kept of each bucket begins empty."
        )
        forget(self.state)

    def close(self) -> None:
        """Take back what was lent to the user's state: it may serve another run."""
        if self._lent_group:
            self.state.process_group = None

    def launch(self, bucket: Bucket) -> InFlight:
        """Run the hook on ``bucket``.

        Collective: whatever the hook does; every rank, in launch order. Blocks on gloo only.
        """
        forget = self._forget_what_is_not_finite if self.heal else None
        result = _HookResult(self.hook(self.state, BucketView(bucket)), bucket, forget)
        if not self.serialize:
            return result
        result.wait()
        return Done()

    def _forget_what_is_not_finite(self, bucket: Bucket) -> None:
        memories = by_bucket(self.state)
        # The error is each rank's own; the gradient is not finite on any rank if it is on one, and
        # factors are forgotten together, so that all ranks draw the same new ones.
        if memories and not bool(torch.isfinite(bucket.grads).all()):
            for memory in memories:
                memory.pop(bucket.index, None)
