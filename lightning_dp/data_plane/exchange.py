"""What ranks send each other about their data, over a small group of its own on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dp.data.content_hash import content_hash
from lightning_dp.data.order import Order
from lightning_dp.engine.group import ReplicaGroup, Waiting
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.errors import ConfigError, UnevenShardError

log = logging.getLogger(__name__)


def open_group(timeout: timedelta | None, waiting: Waiting) -> ReplicaGroup:
    """Make a gloo group over all ranks.

    Of its own, so that what is said here is never paired with a user's collective or a bucket, and on
    the CPU, so that no accelerator has to be waited for.

    Collective: every rank, once, in the same order as other group creations.
    """
    cpu = torch.device("cpu")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ReplicaGroup(None, 0, 1, cpu)
    group = dist.new_group(backend="gloo", timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ReplicaGroup(group, rank, world_size, cpu, control_group=group, waiting=waiting)


def gather_integers(group: ReplicaGroup, value: int) -> list[int]:
    """Return every rank's integer, by rank. Collective: every rank, same order. Blocks."""
    return group.all_gather_object(value, "what ranks know of their data")


class OrderAgreement:
    """Compares what a user's sampler drew on each rank; all ranks go on with rank 0's.

    Args:
        group: Who takes part.
        strict: Raise instead of warning.
    """

    def __init__(self, group: ReplicaGroup, *, strict: bool) -> None:
        self._group = group
        self._strict = strict
        self._said: set[str] = set()

    def __call__(self, order: Order, name: str) -> Order:
        """Return the order to use.

        Raises:
            ConfigError: The ranks differ, and ``strict``.

        Collective: every rank, when a pass begins whose order user code draws. Blocks. One integer a
        rank; the whole order only if ranks differ.
        """
        if self._group.world_size == 1:
            return order
        hashes = gather_integers(self._group, order.fingerprint())
        if len(set(hashes)) == 1:
            return order
        others = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
        message = (
            f"{name} drew another order on rank(s) {others} than on rank 0, although all ran it under the"
            " same seeds: it depends on something that differs between ranks, such as a generator of"
            " its own. Seed it alike on all ranks."
        )
        if self._strict:
            raise ConfigError(message)
        if name not in self._said and self._group.rank == 0:
            log.warning("lean_ddp: %s All ranks now use rank 0's order.", message)
        self._said.add(name)
        agreed: Order = self._group.broadcast_object(order)
        return agreed


@dataclass(eq=False)
class GroupJoin:
    """Stops all ranks at the same step, for loaders whose end nobody knows; see ``data.join``.

    Args:
        group: Who takes part.
        uneven: ``"error"`` or ``"min"``.
        same_data: What to do if ranks see the same first batch: ``"warn"``, ``"error"`` or ``"off"``.
        name: The class of the user's dataset or loader, for messages.
        advice: What to do about different numbers of batches.
    """

    group: ReplicaGroup
    uneven: str
    same_data: str
    name: str
    advice: str
    _looked: bool = field(default=False, init=False)
    _steps: int = field(default=0, init=False)

    def first(self, batch: Any) -> None:
        """Compare first batches, once.

        Raises:
            ConfigError: Ranks see the same data, and that is an error.

        Collective: every rank, at its first batch. Blocks.
        """
        self._steps = 0
        if self._looked or self.same_data not in ("warn", "error"):
            return
        self._looked = True
        prints = gather_integers(self.group, content_hash(batch))
        seen = [value for value in prints if value]
        if len(seen) < 2 or len(set(seen)) == len(seen):
            return
        message = (
            f"{self.name}: several of the {len(prints)} ranks got the same first batch. It seems that"
            " every rank trains on the same data: as many times the cost, and the result of one rank."
            " Choose iterable='shard' if the dataset yields everything in every process, or let the"
            " dataset pick its part from rank and worker; iterable='off' silences this."
        )
        if self.same_data == "error":
            raise ConfigError(message)
        if self.group.rank == 0:
            log.warning("lean_ddp: %s", message)

    def post(self, has_next: bool) -> Callable[[], bool]:
        """Say whether this rank has one more batch; the result waits for the others' word.

        Raises:
            UnevenShardError: From the returned function, on every rank, if some ranks have one more
                and that is an error.

        Collective: every rank, before each batch. Does not block; the returned function does.
        """
        flag = torch.tensor([int(has_next)], dtype=torch.int32)
        work = dist.all_reduce(
            flag, op=dist.ReduceOp.MIN, group=self.group.process_group, async_op=True
        )

        def all_have_one() -> bool:
            interruptible_wait(work)
            if int(flag):
                self._steps += 1
                return True
            self._end(gather_integers(self.group, int(has_next)))
            return False

        return all_have_one

    def _end(self, flags: Sequence[int]) -> None:
        over = [rank for rank, flag in enumerate(flags) if not flag]
        if len(over) == len(flags):
            return
        message = (
            f"The training data ({self.name}) ends at different steps: in this pass rank(s) {over} had"
            f" {self._steps} batches, and rank(s) {[rank for rank, flag in enumerate(flags) if flag]} have"
            " more."
        )
        if self.uneven == "error":
            raise UnevenShardError(
                f"{message} (Batches are read ahead: training had not come to the last of them.)"
                f" {self.advice}",
                ranks=over,
            )
        if self.group.rank == 0:
            log.info("lean_ddp: %s All ranks stop here (uneven_train='min').", message)
