"""Every private name of torch that the engine touches, one small function each, with its fallback.

A torch upgrade is a read of this file. Each function says what happens when its name is missing; a
test removes the name and checks that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

_PACKAGE = "lightning_dp"
WIDE_GLOO = "lean_gloo"  # the name under which torch knows gloo with more threads
GLOO_THREADS = 8


def has_end_of_backward() -> bool:
    """Whether a callback at the end of a backward can be had at all.

    Without it, the strategy finalises after ``backward`` has returned, and a raw ``loss.backward()``
    is finalised before the optimizer steps.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return hasattr(engine, "queue_callback") and hasattr(torch._C, "_current_autograd_node")


def queue_end_of_backward(callback: Callable[[], None]) -> bool:
    """Run ``callback`` at the end of the graph task that is running now; return whether it was queued.

    Inside a re-entrant backward that is the end of the *inner* task: see ``enclosing_node``. False
    under compiled autograd, which traces hooks but refuses callbacks.
    """
    if not has_end_of_backward():
        return False
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except (RuntimeError, AssertionError):
        return False
    return True


def enclosing_node() -> Any | None:
    """In an end-of-backward callback: the node whose backward started this one; None if outermost."""
    current = getattr(torch._C, "_current_autograd_node", None)
    return current() if current is not None else None


def _one_task() -> int:
    return 0


# A number that tells nested backwards apart; always 0 where torch does not offer one. Looked up once:
# it is asked for every gradient.
graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _one_task)


def run_at_end_of_outer(node: Any, callback: Callable[[], None]) -> bool:
    """Run ``callback`` at the end of the backward that runs ``node``; return whether that is arranged.

    A callback queued from the end of an inner backward would run in that inner task again, so a hook
    on the next node of the outer graph does the queueing.
    """
    for following, _ in getattr(node, "next_functions", ()):
        if following is None:
            continue
        handle: list[Any] = []

        def hook(*_: Any, handle: list[Any] = handle) -> None:
            handle.pop().remove()
            queue_end_of_backward(callback)

        handle.append(following.register_prehook(hook))
        return True
    return False


def not_traced(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark ``hook`` so that dynamo calls it instead of tracing it (a plain attribute: no call cost)."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors share ``tensor``'s memory (plus one); always 0 where torch does not count.

    Then only Python references to gradients protect what a user kept, not further views of them.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(tensor.untyped_storage()._cdata)) if count is not None else 0


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, on a device in one kernel; in one each if torch has no other."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def norms_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each, float64 of shape (tensors,); in one kernel each if torch has no other."""
    if hasattr(torch, "_foreach_norm"):
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float64))
    return torch.stack([tensor.norm(dtype=torch.float64) for tensor in tensors])


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written in place; -1 where nobody counts."""
    return -1 if tensor.is_inference() else getattr(tensor, "_version", -1)


def check_input_dim(layer: torch.nn.Module, x: torch.Tensor) -> None:
    """Raise torch's ValueError if ``x`` has other dimensions than this BatchNorm takes (if it says so)."""
    check = getattr(layer, "_check_input_dim", None)
    if check is not None:
        check(x)


def ignored_names(module: torch.nn.Module) -> set[str]:
    """Names in ``module._ddp_params_and_buffers_to_ignore``, the attribute that DDP honours too."""
    names: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return {name.removeprefix("module.") for name in names}


def keep_dynamo_out() -> bool:
    """Tell dynamo, if it is in use, not to trace the engine; return whether it knows.

    Under compiled autograd, hooks run while dynamo watches this thread, and it would try to compile
    what they call. ``not_traced`` covers a hook, not its callees. Without the name, compiled autograd
    fails with dynamo's own message; nothing else depends on it.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")  # not imported: nothing is compiled
    if rules is None or not hasattr(rules, "add") or not hasattr(rules, "SKIP_DIRS"):
        return False
    for name in (f"{_PACKAGE}.engine", __package__):
        folder = os.path.dirname(str(sys.modules[name].__file__))
        if not any(path.startswith(folder) for path in rules.SKIP_DIRS):
            rules.add(name)
    return True


@contextmanager
def split_compiled_graphs(bucket_bytes_cap: int) -> Iterator[None]:
    """Let dynamo cut graphs that it compiles meanwhile at about ``bucket_bytes_cap`` of parameters.

    A module compiled as one graph hands over all gradients when its backward ends, which leaves
    nothing to overlap. Dynamo's own splitter (DDPOptimizer) asks one attribute; without that
    attribute nothing is split and the result is the same, later.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    if not hasattr(ddp, "_active_ddp_module"):
        yield
        return
    keep_dynamo_out()
    # The splitter refuses a cap below its own, fixed, first bucket.
    least = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2**20)
    shim = SimpleNamespace(bucket_bytes_cap=max(bucket_bytes_cap, least))
    before = ddp._active_ddp_module
    ddp._active_ddp_module = shim  # type: ignore[assignment]
    try:
        yield
    finally:
        ddp._active_ddp_module = before


def wide_gloo() -> str | None:
    """Return the name of a gloo backend that works on ``GLOO_THREADS`` collectives at a time.

    torch gives a gloo group two threads, and a third collective waits although the link may idle: each
    step of a ring waits for the other rank to be scheduled. Measured between two cores, 48 all-reduces
    of 0.5 MiB that were started together took 95 ms with two threads and 10 ms with eight, and a fifth
    of the processor time. Idle threads cost nothing.

    ``None`` where torch does not offer the names, or was asked to check collectives in detail, which
    it does for its own backends only: then torch's gloo is used, the result is the same, later.
    """
    gloo = getattr(dist, "ProcessGroupGloo", None)
    options = getattr(gloo, "_Options", None)
    if not all(hasattr(options, name) for name in ("_devices", "_threads", "_timeout")):
        return None
    if not all(hasattr(gloo, name) for name in ("create_device", "create_default_device")):
        return None
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return None
    if WIDE_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            WIDE_GLOO, _make_wide_gloo, extended_api=True, devices=["cpu", "cuda"]
        )
    return WIDE_GLOO


def _make_wide_gloo(backend: Any, _options: object) -> Any:
    """What torch does for gloo, with more threads. ``backend`` says who takes part."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in names] or [
        gloo.create_default_device()
    ]
    options._threads = max(GLOO_THREADS, 2 * len(options._devices))
    options._timeout = backend.timeout
    return gloo(backend.store, backend.group_rank, backend.group_size, options)


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Keys of ``module``'s own buffers that no checkpoint holds; empty where torch does not say."""
    keys: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    return keys


# The base of BatchNorm layers, and that of all layers with running statistics. They fall back to public
# classes, which leaves out what users derive from the common base alone.
BatchNorm: type[torch.nn.Module] = getattr(
    torch.nn.modules.batchnorm, "_BatchNorm", torch.nn.BatchNorm1d
)
NORM_LAYERS: tuple[type[torch.nn.Module], ...] = (
    getattr(torch.nn.modules.batchnorm, "_NormBase", torch.nn.BatchNorm1d),
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
    torch.nn.InstanceNorm1d,
    torch.nn.InstanceNorm2d,
    torch.nn.InstanceNorm3d,
)
