"""An accelerator's rules, checked on the CPU: streams, a host that runs ahead, and NCCL's work.

Everything runs on the CPU at once. What the fake adds is what an accelerator punishes:

* Between a collective's start and its ``wait``, its memory belongs to it. The values are gone (NaN), and
  an operation that reads or writes the memory is an error: a missing wait, a bucket reused in flight.
* ``wait`` returns before the result is there: the stream waits, the host does not. A host that reads a
  result, or what was computed from it, waits for the device: ``host_reads`` counts that. A copy that was
  queued for the host (``copy_to_host``) must not be read before its event was waited for.
* Collectives are matched by their order: the ranks' n-th ones must be the same.

``calls`` records what the streams were told, in order.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires.wire import Wire


class FakeDeviceError(AssertionError):
    """A rule was broken that an accelerator punishes with wrong values or a hang."""


class FakeDevice(TorchDispatchMode):
    """Watches every operation while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.host_reads = 0
        self._in_flight = _Storages()
        self._queued = _Storages()  # results of collectives, and what was computed from them
        self._on_host = _Storages()  # copies that were queued, and whose event was not waited for
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> FakeDevice:
        super().__enter__()
        for name in ("tolist", "numpy"):  # these read memory without an operation
            read = self._reading(getattr(Tensor, name))
            self._patches.enter_context(mock.patch.object(Tensor, name, read))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _reading(self, original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.host_reads_one(tensor)
            return original(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not func.is_view:
            for tensor in tensors:
                if what := self._in_flight.get(tensor):
                    raise FakeDeviceError(
                        f"{func} touches the memory of {what}, which is in flight"
                    )
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_reads_one(tensors[0])
        result = func(*args, **(kwargs or {}))
        if any(self._queued.get(tensor) for tensor in tensors):
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in tree_leaves((result, written)):
                if isinstance(tensor, Tensor):
                    self._queued.add(tensor, "a result")
        return result

    def host_reads_one(self, tensor: Tensor) -> None:
        """The host reads values."""
        if self._on_host.get(tensor):
            raise FakeDeviceError("early host read: the event of this copy was not waited for")
        self.host_reads += self._queued.get(tensor) is not None

    def all_reduce(self, flat: Tensor, what: str, group: ReplicaGroup) -> FakeWork:
        """Start a mean over ranks. Collective: every rank, in the same order."""
        everyone = group.all_gather_object((what, flat.numel()))
        if len(set(everyone)) > 1:
            raise FakeDeviceError(f"collective out of order: {len(self.calls)}: {everyone}")
        self.calls.append(("launch", what))
        result = flat.detach().clone()
        dist.all_reduce(result, op=dist.ReduceOp.AVG, group=group.process_group)
        flat.fill_(float("nan"))
        self._in_flight.add(flat, what)
        return FakeWork(self, flat, result, what)

    def arrive(self, flat: Tensor, result: Tensor, what: str) -> None:
        """The stream waits for a collective: what is queued from here on sees its result."""
        self.calls.append(("wait", what))
        self._in_flight.remove(flat)
        flat.copy_(result)
        self._queued.add(flat, what)

    def copy_to_host(self, block: Tensor) -> tuple[Tensor, FakeEvent]:
        """In place of the engine's function of this name."""
        self.calls.append(("record", "event"))
        host = block.clone()
        self._queued.remove(host)
        self._on_host.add(host, "a copy")
        return host, FakeEvent(self, host)

    def synchronize(self, host: Tensor) -> None:
        """The host waits for an event."""
        self.calls.append(("synchronize", "event"))
        self._on_host.remove(host)


class FakeWork:
    """What NCCL returns: ``wait`` is about the stream."""

    def __init__(self, device: FakeDevice, flat: Tensor, result: Tensor, what: str) -> None:
        self._arrive = lambda: device.arrive(flat, result, what)

    def wait(self) -> None:
        self._arrive()


class FakeEvent:
    """Recorded behind a copy to the host."""

    def __init__(self, device: FakeDevice, host: Tensor) -> None:
        self.synchronize = lambda: device.synchronize(host)


class FakeNCCL(Wire):
    """A wire on a fake device."""

    def __init__(self, group: ReplicaGroup, device: FakeDevice) -> None:
        self.group, self.device = group, device

    def launch(self, bucket: Bucket) -> FakeWork:
        return self.device.all_reduce(bucket.allocate(), f"bucket {bucket.index}", self.group)


class _Storages:
    """Pieces of memory, by what they are; a weak reference keeps a number from being used again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}

    def add(self, tensor: Tensor, what: str) -> None:
        if tensor.layout is torch.strided:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._known[reference.cdata] = reference, what

    def remove(self, tensor: Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def get(self, tensor: Tensor) -> str | None:
        if tensor.layout is not torch.strided:
            return None
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known[1] if known is not None else None
