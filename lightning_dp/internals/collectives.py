"""See a user's own collectives: the functions of ``torch.distributed``, also as metrics call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

_NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip


@contextmanager
def collectives_checked(check: Callable[[str], None]) -> Iterator[None]:
    """Inside, call ``check`` with the name of each collective over all ranks, before it begins. Local.

    A group of fewer ranks is left alone. Names that this version of torch lacks are left out.
    """
    originals = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
    try:
        for name, original in originals.items():
            setattr(dist, name, _checked(name, original, check))
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _checked(name: str, original: Any, check: Callable[[str], None]) -> Any:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        groups = [each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)]
        if all(each is dist.group.WORLD for each in groups):
            check(f"torch.distributed.{name}")
        return original(*args, **kwargs)

    return call


def group_set_aside() -> Callable[[], None]:
    """Be without a default process group of several ranks: metrics and loggers take this process for alone.

    Its ranks need not do the same, and nothing in it ends. Falls back to leaving it where it is.

    Returns:
        Undoes it.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    update = getattr(dist.distributed_c10d, "_update_default_pg", None)
    if update is None or group is None or group.size() == 1:
        return lambda: None
    update(None)
    return lambda: update(group)
