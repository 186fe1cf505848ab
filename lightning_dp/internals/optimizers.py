"""Private names of torch's optimizers, one small function each, with its fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def run_first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> Any:
    """Register ``hook`` to run after each step, before the optimizer's other hooks; return its handle.

    Without the name it runs after those that were registered before: these then see each rank's share.
    """
    handle = optimizer.register_step_post_hook(hook)
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if hasattr(hooks, "move_to_end") and hooks:
        hooks.move_to_end(next(reversed(hooks)), last=False)
    return handle
