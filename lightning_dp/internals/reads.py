"""Names of torch through which a parameter is read without its class being asked, with their fallbacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_dp.internals.patch import all_of, patched

_CONSTRUCTORS = (
    *("tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_compressed_tensor"),
    *("sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor"),
)
_STATIC = ("__new__", "_make_subclass")
_COLLECTIVES = (
    *("allgather", "allgather_into_tensor_coalesced", "_allgather_base", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "reduce"),
    *("reduce_scatter", "_reduce_scatter_base", "scatter", "send"),
)


def is_compiling_in_use() -> bool:
    """Whether Dynamo has compiled something in this process: it would compile for the class that it meets.

    Where it does not say, being imported counts.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return False
    counters = getattr(utils, "counters", None)
    return counters is None or counters["frames"]["total"] > 0


def watch_native_readers(
    everything: Callable[[], None], arguments: Callable[[Any], object]
) -> Callable[[], None]:
    """Call ``everything()`` or ``arguments(values)`` before native code reads tensors.

    The first before code that holds parameters of its own, or wraps what it gets (TorchScript, transforms
    of functions, captured CUDA graphs, ``swap_tensors``); the second, with what it is given, before code
    that takes a parameter as if it were any tensor (constructors, DLPack, collectives). Names that this
    version of torch lacks are left out.

    Returns:
        Undoes it.
    """
    transforms = sys.modules.get("torch._functorch.eager_transforms")
    vmap = sys.modules.get("torch._functorch.vmap")
    holders: tuple[tuple[Any, str], ...] = (
        (transforms, "_grad_increment_nesting"),
        (transforms, "_jvp_increment_nesting"),
        (transforms, "_func_increment_nesting"),
        (vmap, "_vmap_increment_nesting"),
        (torch.utils, "swap_tensors"),
        (getattr(torch.cuda, "CUDAGraph", None), "replay"),
        (getattr(torch._C, "ScriptFunction", None), "__call__"),
        (getattr(torch._C, "ScriptMethod", None), "__call__"),
    )
    takers: tuple[tuple[Any, str], ...] = (
        *((torch, name) for name in _CONSTRUCTORS),
        *((torch.Tensor, name) for name in ("as_subclass", "new", "new_tensor", "_make_subclass")),
        *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")),
        (torch.utils.dlpack, "to_dlpack"),
        (torch.nn.Parameter, "__new__"),
        (dist, "_broadcast_coalesced"),
        *((dist.ProcessGroup, name) for name in _COLLECTIVES),
    )
    undos = [_before(owner, name, lambda _: everything()) for owner, name in holders]
    undos += [_before(owner, name, arguments) for owner, name in takers]
    return all_of(*undos)


def _before(owner: Any, name: str, act: Callable[[Any], object]) -> Callable[[], None]:
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None

    def call(*args: Any, **kwargs: Any) -> Any:
        act((args, kwargs))
        return original(*args, **kwargs)

    return patched(owner, name, staticmethod(call) if name in _STATIC else call)
