"""Count what goes over the wire, at two levels, so that nothing slips past."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.opening import Opening
from lightning_dp.engine.wires.shared_memory import SharedMemory
from lightning_dp.engine.wires.wire import InFlight, Wire

# Every public function of torch.distributed that communicates.
FUNCTIONS = [
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
]  # fmt: skip


class CollectiveSpy(TorchDispatchMode):
    """Counts collectives while it is entered.

    ``calls`` counts calls of torch.distributed's functions (outer ones only: ``all_gather_object`` is one),
    ``ops`` counts what reaches c10d's dispatcher, from whatever Python or C++ code, in forward or backward.
    A sum that the engine starts in shared memory counts as an all-reduce in both. Where each reduction
    opens with a small message on the host, as on an accelerator, that is counted in ``openings`` alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()
        self.openings = 0
        self._depth = 0
        self._stack: list[contextlib.ExitStack] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.ops[func._opname.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> CollectiveSpy:
        stack = contextlib.ExitStack()
        for name in FUNCTIONS:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, self._counted(name)))
        stack.enter_context(mock.patch.object(SharedMemory, "start", self._started()))
        stack.enter_context(mock.patch.object(Opening, "__init__", self._opened()))
        self._stack.append(stack)
        super().__enter__()
        return self

    def _started(self) -> Any:
        original = SharedMemory.start

        def started(memory: SharedMemory, flat: torch.Tensor) -> Any:
            self.calls["all_reduce"] += 1
            self.ops["allreduce"] += 1
            return original(memory, flat)

        return started

    def _opened(self) -> Any:
        original = Opening.__init__

        def opened(opening: Opening, group: ReplicaGroup, *args: Any, **kwargs: Any) -> None:
            before = self.calls.copy(), self.ops.copy()
            original(opening, group, *args, **kwargs)
            if not group.host_reads_are_free:
                self.calls, self.ops = before
                self.openings += 1

        return opened

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.pop().close()

    def _counted(self, name: str) -> Any:
        original = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self.calls[name] += 1
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted

    @property
    def total(self) -> int:
        """Collectives since it was made; the two levels must agree unless objects were sent."""
        return sum(self.ops.values())

    @contextlib.contextmanager
    def expecting(self, **ops: int) -> Iterator[None]:
        """Exactly these operations happen inside."""
        before = Counter(self.ops)
        with self:
            yield
        seen = {name: n - before[name] for name, n in self.ops.items() if n != before[name]}
        assert seen == {k: v for k, v in ops.items() if v}, f"collectives: {seen}, expected {ops}"


class KernelSpy(TorchDispatchMode):
    """Counts operators that run on a device: views, which only make a Python object, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.reads = 0  # values that the host waited for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not func.is_view
        self.reads += func._opname in ("_local_scalar_dense", "equal", "is_nonzero", "item")
        return func(*args, **(kwargs or {}))


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    seen = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


# Operators whose result's value or shape the host must know: it waits for the device there.
_HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
# What is read on the host because it was made there: the opening's message, the copy of a step before.
_ON_HOST = {("opening.py", "wait"), ("control.py", "means")}


class HostReadSpy(TorchDispatchMode):
    """Notes where the host reads a tensor while it is entered; on a CPU, of what may be on a device.

    torch's optimizers and loss scalers read numbers of their own, and are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._stack: list[contextlib.ExitStack] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func._opname in _HOST_READS:
            self._note(func._opname)
        return func(*args, **(kwargs or {}))

    def _note(self, what: str) -> None:
        for frame in traceback.extract_stack()[::-1]:
            path = Path(frame.filename)
            if "optim" in path.parts or path.name == "grad_scaler.py":
                return
            if (path.name, frame.name) in _ON_HOST:
                return
            if "torch" not in path.parts and path != Path(__file__):
                self.places[f"{what} in {path.name}, {frame.name}, line {frame.lineno}"] += 1
                return

    def __enter__(self) -> HostReadSpy:
        stack = contextlib.ExitStack()
        for name in ("tolist", "cpu", "numpy"):  # they may not pass the dispatcher
            stack.enter_context(mock.patch.object(torch.Tensor, name, self._noted(name)))
        self._stack.append(stack)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.pop().close()

    def _noted(self, name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return original(*args, **kwargs)

        return noted


class RecordingWire(Wire):
    """Notes for each launch ``(bucket index, names of its parameters, bytes)`` and passes it on."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self.launches: list[tuple[int, tuple[str, ...], int]] = []
        self.carries_control, self.keyed_by_bucket = inner.carries_control, inner.keyed_by_bucket
        self.predivide_factor, self.slicing = inner.predivide_factor, inner.slicing
        self.ratio, self.gathers = inner.ratio, inner.gathers
        self.nbytes, self.forget, self.close = inner.nbytes, inner.forget, inner.close

    def launch(self, bucket: Bucket) -> InFlight:
        self.launches.append((bucket.index, tuple(bucket.names), bucket.nbytes))
        return self.inner.launch(bucket)
