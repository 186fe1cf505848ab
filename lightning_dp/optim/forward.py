"""Updated parameters come back while the next forward runs, not before the step ends.

[Note: all is sent at once] A step ends when every bucket is sent, so that waiting for one needs nothing
more from other ranks: whoever reads a parameter on one rank only, or in another order than others, waits
for the network alone. What is under way is in memory of its own, ``HELD_BYTES`` at most; of a larger model
the rest is waited for inside the step.

[Note: in order of use] Buckets are numbered as their gradients arrive, so the last one holds what the
forward needs first. They have a process group of their own with gloo's usual two threads: more of them
would share the link between buckets that are needed later and the one that is needed now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import some_names
from lightning_dp.internals.patch import all_of
from lightning_dp.internals.reads import is_compiling_in_use, watch_native_readers
from lightning_dp.optim import guard
from lightning_dp.optim.gather import BucketGather, ParameterGather
from lightning_dp.optim.shares import Shares

log = logging.getLogger(__name__)

HELD_BYTES = 256 * 2**20
GIVE_UP_S = 1.0
_open: WeakSet[ForwardGather] = WeakSet()


class ForwardGather(ParameterGather):
    """As its parent, but values come when they are read ([Note: how a read is seen]).

    Args:
        shares: Who updates what.
        group: Who takes part.
        lane: The same ranks; carries nothing else. Closed with this.

    Attributes:
        waiting_for: The bucket that a thread waits for now.
    """

    def __init__(self, shares: Shares, group: ReplicaGroup, lane: dist.ProcessGroup | None) -> None:
        super().__init__(shares, group)
        self._lane = lane
        self._lock = threading.RLock()
        self._under_way: dict[Bucket, BucketGather] = {}  # in the order in which they were sent
        self._unwatch: Callable[[], None] | None = None
        self._told: set[str] = set()
        self._process = os.getpid()
        self._lost: BaseException | None = None
        self.waiting_for: Bucket | None = None
        _open.add(self)

    @classmethod
    def connect(
        cls, shares: Shares, group: ReplicaGroup, timeout: timedelta | None = None
    ) -> ForwardGather:
        """Make the second group, over all ranks of the default group; NCCL needs none.

        Collective: every rank, once, in the same order as other group creations.
        """
        if not group.waits_on_host:
            return cls(shares, group, group.process_group)
        return cls(shares, group, dist.new_group(timeout=timeout, backend="gloo"))

    @torch.no_grad()
    def run(self, buckets: Sequence[Bucket]) -> None:
        """Send this rank's part of ``buckets`` to all; the others' come later.

        Collective: every rank, the same buckets in the same order. Does not block for what it may hold
        (``HELD_BYTES``). Sends as much as its parent.
        """
        self.finish()
        if self._lost is not None:
            raise RuntimeError("updated parameters of an earlier step never came") from self._lost
        with self.group.waiting("updated parameters"):
            for bucket in reversed(buckets):
                self._send(bucket)
        if is_compiling_in_use():
            self._say("torch.compile is in use, which compiles for what it finds")
            self.finish()
        elif self._under_way:
            self._watch()

    def finish(self) -> None:
        """Wait for all that is under way. Local: every rank has sent it."""
        for bucket in list(self._under_way):
            self._bring(bucket)

    def give_up(self) -> None:
        """Take what has come, wait a second at most for the rest. Local.

        Ranks that failed may never have sent theirs. What does not come stays as it was, and the next step
        raises, in case there is one.
        """
        gathers = list(self._under_way.values())
        poll_until(lambda: all(each.is_there for each in gathers), GIVE_UP_S)
        self._drop(None)

    def close(self) -> None:
        """Take what has come, wait a second at most for the rest, end the group. Local."""
        if self._process != os.getpid():
            return
        self.give_up()
        lane, self._lane = self._lane, None
        if lane not in (None, self.group.process_group) and dist.is_initialized():
            dist.destroy_process_group(lane)

    def _drop(self, error: BaseException | None) -> None:
        """Take what is there; let nobody wait for the rest."""
        with self._lock, torch.no_grad():
            for gather in self._under_way.values():
                try:
                    if gather.is_there:
                        gather.finish()
                    else:
                        self._lost = error or RuntimeError("training had failed")
                except RuntimeError as failed:
                    self._lost = failed
                for slot in gather.comes:
                    guard.has_come(slot.param)
            self._under_way.clear()
            self._watch_no_more()

    def _send(self, bucket: Bucket) -> None:
        gather = BucketGather(bucket, self.shares, self.group, self._lane)
        self._under_way[bucket] = gather
        held = sum(each.nbytes for each in self._under_way.values())
        while held > HELD_BYTES and len(self._under_way) > 1:
            first, oldest = next(iter(self._under_way.items()))
            held -= oldest.nbytes
            self._bring(first)

    def _watch(self) -> None:
        """Let who reads a parameter wait for it; wait now for those of which a read might not be seen."""
        everything = [s.param for b in self.shares.buckets for s in b.slots if not s.removed]
        seen_alone = guard.seen_alone(everything)
        for bucket, gather in list(self._under_way.items()):
            slots = gather.comes
            seen = [guard.can_await(slot.param) and seen_alone(slot.param) for slot in slots]
            if not all(seen):
                unseen = [
                    slot.name for slot, is_seen in zip(slots, seen, strict=True) if not is_seen
                ]
                self._say("other tensors, or processes, share memory with", some_names(unseen))
                self._bring(bucket)
                continue
            for slot in slots:
                guard.await_value(slot.param, partial(self._bring, bucket))
        if self._under_way:
            hook = register_module_forward_pre_hook(guard.before_module)
            self._unwatch = all_of(hook.remove, watch_native_readers(guard.bring_all, guard.bring))

    def _watch_no_more(self) -> None:
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def _bring(self, bucket: Bucket) -> None:
        """Wait for one bucket, in whatever thread. Blocks (on CUDA: the stream only)."""
        if self._process != os.getpid():
            raise RuntimeError(
                "this process was forked while updated parameters were on their way, which only its parent"
                " receives. Fork between steps from the training thread, or use zero={'gather': 'step'}."
            )
        with self._lock, torch.no_grad():
            gather = self._under_way.get(bucket)
            if gather is None:
                return
            self.waiting_for = bucket
            try:
                gather.finish()
            except BaseException as error:
                self._lost = error
                self._drop(error)
                raise
            finally:
                self.waiting_for = None
            for slot in gather.comes:
                guard.has_come(slot.param)
            del self._under_way[bucket]
            if not self._under_way:
                self._watch_no_more()

    def _say(self, why: str, what: str = "") -> None:
        if why not in self._told and self.group.rank == 0:
            text = "lean_ddp: zero: parameters come back when the step ends, not in the next forward: %s."
            log.info(text, f"{why} {what}".strip())
        self._told.add(why)


def _before_fork() -> None:
    """A forked process (a data loading worker) has the values, and nothing to wait for."""
    for each in list(_open):
        with contextlib.suppress(RuntimeError):  # the training thread meets it again
            each.finish()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
