"""What the ranks reported in a control tail, kept until the host may read it for free."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.agreement import raise_remote_errors
from lightning_dp.engine.reduction.window import Control
from lightning_dp.errors import LateGradientError, NonFiniteGradientError, some_names

if TYPE_CHECKING:
    from lightning_dp.engine.reduction.reducer import Reducer
    from lightning_dp.engine.reduction.session import Session

log = logging.getLogger(__name__)


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


def act_on(reducer: Reducer, report: Report) -> None:
    """Do on every rank what any rank reported in the tail: raise, or learn about buffers.

    Collective: every rank exchanges names, only if something was reported. Blocks.
    """
    means = report.means()
    group = reducer.group
    if means[Control.STOP] > 0 and reducer.on_stop is not None:
        reducer.on_stop()
    if means[Control.ERROR] > 0:
        raise_remote_errors(group.all_gather_object(None), group.rank)
    if means[Control.LATE] > 0:
        names, ranks = _gather_names(group, report.late)
        reducer.defer(names)
        raise LateGradientError(
            f"[rank {group.rank}] a second gradient of {some_names(names)} arrived after the first had"
            " been sent, so this step's average would miss it. These parameters are used in several"
            " re-entrant backwards (activation checkpointing with use_reentrant=True, or a backward"
            " inside a backward) for the first time now. They are sent last from the next step on; to"
            f" have that from the start, pass deferred={names[:5]!r} to LeanDDPStrategy.",
            names=names,
            ranks=ranks,
        )
    if means[Control.NON_FINITE] > 0:
        names, ranks = _gather_names(group, report.non_finite)
        message = (
            f"[rank {group.rank}] gradients of {some_names(names)} held inf or NaN on rank(s) {ranks}"
            " before they were averaged. Look at that rank's batch; lower the learning rate or clip."
        )
        if reducer.check_finite == "raise":
            raise NonFiniteGradientError(message, names=names, ranks=ranks)
        log.warning(message)
    if means[Control.BUFFERS] > 0 and reducer.keeper is not None:
        reducer.keeper.learn(report.buffers)


def _gather_names(group: ReplicaGroup, names: list[str]) -> tuple[list[str], list[int]]:
    by_rank: list[list[str]] = group.all_gather_object(names)
    ranks = [rank for rank, theirs in enumerate(by_rank) if theirs]
    return list(dict.fromkeys(name for theirs in by_rank for name in theirs)), ranks
