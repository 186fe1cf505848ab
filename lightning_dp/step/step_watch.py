"""Whether an optimizer really stepped: a gradient scaler skips steps, and asking it would stop the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class StepWatch:
    """Hooks that note each optimizer's steps.

    Args:
        optimizers: As the Trainer has them. One without hooks of its own is taken to step whenever it is
            asked.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._stepped = False
        hooked = [o for o in optimizers if hasattr(o, "register_step_post_hook")]
        self._knows = len(hooked) == len(optimizers)
        self._handles = [optimizer.register_step_post_hook(self._note) for optimizer in hooked]

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since this was asked the last time."""
        stepped, self._stepped = self._stepped, False
        return stepped or not self._knows

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
