"""What the ranks reported in a control tail, kept until the host may read it for free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_dp.engine.session import Session


class Report:
    """One session's reduced control tail, and the names that this rank would add to it.

    On a CPU the values are there. On an accelerator they are copied to the host behind the step's own
    work and read one step later: reading them at once would stop the host in every step. All ranks are
    one step late alike, so what they do about it still pairs up.

    Args:
        tail: Shape ``(CONTROL_SIZE,)``, reduced.
        session: Where it came from.
        readable: Whether the host may read ``tail`` now.
    """

    def __init__(self, tail: Tensor, session: Session, readable: bool) -> None:
        self.late = [slot.name for slot in session.late]
        self.non_finite = list(session.non_finite)
        self.buffers = list(session.buffers)
        self._event: torch.cuda.Event | None = None
        self._host = tail
        if not readable:
            self._host = torch.empty(tail.shape, dtype=tail.dtype, pin_memory=True)
            self._host.copy_(tail, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def means(self) -> list[float]:
        """The tail's values, means over ranks. Waits for the copy, not for the device's queue."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values
