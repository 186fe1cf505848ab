"""The failure channel seen from the thread that trains: one per call of the trainer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence

import torch.distributed as dist

from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.faults.channel import FailureChannel
from lightning_dp.faults.interrupt import Interrupter
from lightning_dp.faults.liveness import ProcessIdentity
from lightning_dp.faults.peers import Peers
from lightning_dp.faults.record import FailureRecord, is_consequence
from lightning_dp.faults.root_cause import explain, find_root_cause, wait_until_read
from lightning_dp.faults.sockets import GroupSockets
from lightning_dp.faults.store import Store
from lightning_dp.faults.waits import EngineWait, Waits
from lightning_dp.faults.watchdog import Watchdog


@dataclasses.dataclass(eq=False, kw_only=True)
class FailureGuard:
    """Turns the first failure of any rank into an error on every rank.

    A guard without a channel (a world of one, or before the ranks have met) lets everything pass.

    Args:
        error_grace_s: Seconds that a rank with a lost connection waits to learn why, and seconds
            between two steps of bringing a rank to an end.
        stall_report_s: Seconds after which a wait is reported; 0 for never.
        is_agreed: Says of an exception that all ranks raise it together (an agreed stop, the end of a
            search for a learning rate), so that it is no failure.
        engine_wait: What the engine waits for; called by the watchdog.
        where: What this rank is doing, for reports.
        groups: Process groups in which this rank may be blocked.
        on_failure: Given the error with which this rank leaves.

    Attributes:
        failing: This rank is leaving with an error. Nothing collective can succeed any more.
        first: The failure that was first, once this rank is failing.
    """

    error_grace_s: float = 3.0
    stall_report_s: float = 30.0
    is_agreed: Callable[[BaseException], bool] = lambda error: False
    engine_wait: Callable[[], EngineWait] = lambda: EngineWait(0)
    where: Callable[[], str] = str
    groups: Callable[[], Sequence[dist.ProcessGroup]] = tuple
    on_failure: Callable[[BaseException], None] = lambda error: None

    def __post_init__(self) -> None:
        self.failing = False
        self.first: FailureRecord | None = None
        self.waits = Waits()
        self.sockets = GroupSockets()
        self.channel: FailureChannel | None = None
        self.watchdog: Watchdog | None = None
        self._interrupter = Interrupter()
        self._hosts_store = False

    @contextlib.contextmanager
    def guarding(self) -> Generator[None]:
        """Around a call of the trainer.

        Raises:
            RankFailedError: Another rank failed first.

        Collective: none, but every rank should be inside for as long as it communicates.
        """
        self.failing = False
        self.first = None
        try:
            with self._interrupter.armed():
                try:
                    yield
                except BaseException as error:
                    self._interrupter.disarm()
                    replacement = self._failed(error)
                    if replacement is not None:
                        # Not "from error": a lost connection above the cause would only bury it.
                        raise replacement from None
                    raise
        except BaseException as error:
            self.failing = not self.is_agreed(error)  # also if the interrupt hit the handler above
            raise
        finally:
            self.close()

    def open(
        self,
        store: Store,
        rank: int,
        processes: Sequence[ProcessIdentity],
        *,
        thread_store: Store,
        children: Callable[[], Mapping[int, int]] = dict,
        store_host: int = 0,
        parent_pid: int | None = None,
        each_look: Callable[[FailureChannel], None] = lambda channel: None,
    ) -> None:
        """Begin to watch, once the ranks have met.

        Args:
            store: For the thread that trains.
            rank: This rank.
            processes: Of all ranks.
            thread_store: The same keys through another connection, for the watchdog.
            children: Exit codes by rank of children that have ended.
            store_host: The rank that hosts the store; -1 if none of them.
            parent_pid: End with this parent.
            each_look: Called by the watchdog at each look.

        Collective: none.
        """
        world_size = len(processes)
        self.close()
        self.channel = FailureChannel(store, rank, world_size)
        self.waits.open(self.channel, self.engine_wait, self.where)
        self._hosts_store = store_host == rank
        self.watchdog = Watchdog(
            FailureChannel(thread_store, rank, world_size),
            Peers(processes, rank, children, store_host),
            self.waits,
            self._interrupter,
            self.sockets,
            error_grace_s=self.error_grace_s,
            stall_report_s=self.stall_report_s,
            parent_pid=parent_pid,
            where=self.where,
            groups=self.groups,
            each_look=each_look,
        )
        self.watchdog.start()

    def close(self) -> None:
        """Stop watching; tell the others that this rank has left."""
        watchdog, self.watchdog = self.watchdog, None
        if watchdog is not None:
            watchdog.stop()
        self.waits.close()
        channel, self.channel = self.channel, None
        if channel is not None and not self.failing:
            with contextlib.suppress(dist.DistError, RuntimeError):
                channel.leave()

    def publish(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed, before it sends anything else. Never raises.

        Collective: none.
        """
        channel = self.channel
        if channel is None or self.is_agreed(error) or is_consequence(error):
            return
        with contextlib.suppress(dist.DistError, RuntimeError):
            channel.publish(FailureRecord.from_exception(channel.rank, error, self.where()))

    def barrier(self, name: str, plain: Callable[[], None]) -> None:
        """A barrier that can be interrupted, and that all ranks must enter by the same name.

        Args:
            name: Who calls.
            plain: The barrier of a backend that does not block the host in a way of its own.

        Raises:
            RankFailedError: Another rank is elsewhere (at a barrier of another name), or has failed.

        Collective: every rank of the default group, unless this rank is failing: then it returns at
        once, because the others may never come. Blocks.
        """
        if self.failing or not dist.is_initialized():
            return
        with self.waits.waiting(f"barrier '{name}'" if name else "a barrier"):
            if dist.get_backend() == "gloo":
                interruptible_wait(dist.barrier(async_op=True))
            else:
                plain()

    def _failed(self, error: BaseException) -> BaseException | None:
        """This rank leaves with ``error``: tell the others, or learn what came first.

        Returns:
            The error to raise in its place, or None.
        """
        channel, watchdog = self.channel, self.watchdog
        if self.is_agreed(error):
            return None
        self.failing = True
        if watchdog is not None:
            watchdog.unwinding = True
        replacement = None
        if channel is not None and watchdog is not None:
            self.first = find_root_cause(
                channel,
                watchdog,
                error,
                where=self.where(),
                waited_for=self.waits.last,
                grace_s=self.error_grace_s,
            )
            replacement = explain(self.first, channel, error)
        if channel is not None and self._hosts_store:
            wait_until_read(channel, self.first)
        self.on_failure(replacement if replacement is not None else error)
        self.sockets.close_all()  # ranks blocked in a collective with this one get an error now
        return replacement
