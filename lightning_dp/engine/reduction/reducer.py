"""The reducer: gradients become ready, buckets leave in order, the end of the backward collects them.

    IDLE --(loss or first gradient)--> OPEN --(end of the outermost backward)--> IDLE

A *session* is one outermost backward that reduces. While it is open, each parameter's hook lowers the
pending count of its bucket, and buckets leave in launch order on every rank. What is left leaves when
the backward ends, the control tail with the last.

[Note: launch order] Every rank issues the same collectives in the same order. The order is a function
of the agreed layout and of which parameters are trainable, never of which gradients arrived: a bucket
whose gradients are all here still waits for its predecessors.

[Note: why the end is in autograd's callback] Lightning calls ``on_after_backward`` before the strategy's
``post_backward``. Waiting in the callback, which runs before ``backward`` returns, shows averaged
gradients to hooks, loggers and clipping. ``post_backward`` is the safety net where there is no callback.

[Note: late gradients] A parameter used in two re-entrant backwards fires twice. Those seen to do so are
sent last. If one fires again after its bucket left, ``.grad`` was taken away at launch, so nothing in
flight is touched; the fact travels in the control tail and every rank raises.

This file is longer than others because these notes stand where they govern.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.agreement import Agreement
from lightning_dp.engine.plan.layout import Layout, LayoutOptions
from lightning_dp.engine.plan.registry import Registry
from lightning_dp.engine.plan.retune import TUNE_AT, tune
from lightning_dp.engine.reduction.finalize import finish
from lightning_dp.engine.reduction.report import Report
from lightning_dp.engine.reduction.session import Session
from lightning_dp.engine.reduction.timing import SessionTimes, now
from lightning_dp.engine.reduction.window import AccumulationWindow, WindowTotals
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.engine.wires.wire import Wire, default_wire
from lightning_dp.errors import some_names
from lightning_dp.internals import autograd as seams

log = logging.getLogger(__name__)

LEARNING_SESSIONS = 3


class Reducer:
    """Averages gradients of one module over replicas while the backward goes on.

    Args:
        module: The user's module; never wrapped, nothing is stored on it or on its parameters.
        group: Who takes part.
        window: Says whether a backward reduces, and what it weighs.
        wire: How buckets travel; default: through shared memory if ``group`` has met there, otherwise one
            all-reduce each.
        options: How buckets are cut.
        partition_of: Parameters with different numbers never share a bucket (one per optimizer, so
            that a GAN's discriminator is not sent with its generator).
        deferred: Name patterns of parameters to send last from the start (``"decoder.*"``).
        check_finite: ``"off"``, ``"warn"`` or ``"raise"``: look at local gradients before they are sent.
        keeper: Who keeps buffers equal; its news travel in the control tail.

    """

    def __init__(
        self,
        module: nn.Module,
        group: ReplicaGroup,
        window: AccumulationWindow,
        wire: Wire | None = None,
        options: LayoutOptions | None = None,
        *,
        partition_of: Callable[[nn.Parameter], int] = lambda _: 0,
        deferred: Sequence[str] = (),
        check_finite: str = "off",
        keeper: BufferKeeper | None = None,
    ) -> None:
        self.group = group
        self.window = window
        self.wire: Wire = wire if wire is not None else default_wire(group)
        self.layout = Layout(group.device, options or LayoutOptions())
        self.registry = Registry(module, group.device, partition_of)
        self.deferred = tuple(deferred)
        self.check_finite = check_finite
        self.keeper = keeper
        self._means: Tensor | None = None
        self._report: Report | None = None
        self.on_stop: Callable[[], None] | None = None  # called on all ranks when any asked to stop
        self.times: SessionTimes | None = None
        self.exact_times = False
        self.sessions = 0
        self._session: Session | None = None
        self._handles: dict[int, Any] = {}  # by slot number
        self._reduces_early = group.world_size > 1
        seams.keep_dynamo_out()
        self._attach(self.registry.slots)

    # Life cycle

    def add_parameters(self) -> list[str]:
        """Take in parameters that the module got since the last look; return their names.

        They must be equal on all ranks already (``replicas.synchronize``). What the module lost
        meanwhile keeps its place in the buckets and nothing else.
        """
        for slot in self.registry.drop_removed():
            if slot.index in self._handles:
                self._handles.pop(slot.index).remove()
        new = self.registry.add_new()
        self._attach(new)
        return [slot.name for slot in new]

    def close(self) -> None:
        """Remove every hook and let go of all storage; gradients stay valid."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.wire.close()
        self._session = None
        for slot in self.registry.slots:
            slot.bucket = slot.view = slot.grad_view = slot.kept = None
        self.layout.buckets.clear()

    def release_storage(self) -> int:
        """Give back the memory of buckets in which no gradient lives; return the bytes.

        Called before a forward, and before a backward: Lightning zeroes gradients between the two, and
        that is when activations need most memory. Buckets of many small gradients keep theirs, unless
        somebody kept one of these gradients.
        """
        if self._session is not None:
            return 0
        buckets = [bucket for bucket in self.layout.buckets if bucket.should_release()]
        return sum(bucket.nbytes for bucket in buckets if bucket.release())

    # One backward

    @property
    def is_open(self) -> bool:
        """Whether a reducing backward has begun and not ended."""
        return self._session is not None

    @property
    def nested(self) -> bool:
        """Whether this is called from inside a backward that is still running."""
        return seams.enclosing_node() is not None

    def arm(self, loss: Tensor) -> None:
        """Open a session when the backward of ``loss`` begins, if the window reduces.

        The loss's own hook runs first and in the outermost graph task, also for a loss that reaches no
        parameter: a rank without work still takes part.

        Args:
            loss: Any shape; a loss without gradient is left alone.
        """
        self.release_storage()  # not only when the first gradient arrives: then activations are gone
        if self.window.reduces and loss.requires_grad:
            ref = weakref.ref(self)

            def on_loss(_grad: Tensor) -> None:
                reducer = ref()
                if reducer is not None and reducer.window.reduces:
                    reducer._open(outermost=True)

            loss.register_hook(seams.not_traced(on_loss))  # type: ignore[no-untyped-call]

    def reduce_now(self, partition: int | None = None) -> None:
        """Average the gradients that are there, outside of any backward.

        Args:
            partition: Only buckets of this partition; ``None`` means all.

        Collective: every rank, once per call. Blocks (on CUDA: the stream only). Nothing overlaps.
        """
        if self._session is None and not self.nested:
            self.sessions += 1
            self._session = Session(self, self.sessions, -1, partition)
        self.finalize()

    def finalize(self) -> None:
        """Finish an open session: launch what is left, wait, hand gradients back. Idempotent.

        Raises:
            RankFailedError: Another rank's backward raised.
            LateGradientError: A gradient came after its bucket had left, on any rank.
            NonFiniteGradientError: ``check_finite="raise"`` and some rank's gradients are not finite.
            ReplicaMismatchError: Ranks differ in what is trainable.

        Collective: every rank, once per session. Blocks (on CUDA: the stream only).
        """
        session = self._session
        if session is None:
            return
        try:
            finish(self, session)
            if session.arrivals is not None:
                tune(self, session)
        finally:
            self._session = None
            self.times = session.times
            for slot in session.touched:
                slot.kept = None

    def abort(self, error: BaseException) -> None:
        """Give up an open session because this rank's backward raised.

        The remaining buckets are sent as zeros with the error flag, so that the other ranks end their
        step with an error that names this rank, and the engine is usable afterwards.

        Collective: completes the session's collectives. Waits a few seconds at most, never raises.
        """
        session = self._session
        self._session = None
        if session is not None:
            session.give_up(self, error)
            self.registry.clear_gradients()

    # Hooks

    def _attach(self, slots: Sequence[Slot]) -> None:
        if not self._reduces_early:
            return
        for slot in slots:
            if slot.param.is_inference():
                continue  # autograd refuses it: it can never be trained
            slot.deferred = any(fnmatch(slot.name, pattern) for pattern in self.deferred)
            trainable = slot.param.requires_grad
            # A frozen parameter is hooked as well: the hook survives freezing and unfreezing, and
            # without it a layer unfrozen in mid-training would silently stay local.
            slot.param.requires_grad_(True)
            handle = slot.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(slot)
            )
            slot.param.requires_grad_(trainable)
            self._handles[slot.index] = handle

    def _hook(self, slot: Slot) -> Callable[[Tensor], None]:
        ref = weakref.ref(self)

        def on_gradient(_param: Tensor) -> None:
            reducer = ref()
            if reducer is not None and reducer.window.reduces:
                reducer._ready(slot)

        return seams.not_traced(on_gradient)

    def _ready(self, slot: Slot) -> None:
        """One gradient has arrived. The hot path: called once per parameter and backward."""
        session = self._session
        if session is None:
            session = self._open(outermost=False)
        if session.arrivals is not None:
            session.arrivals[slot.index] = now()
        nested = seams.graph_task_id() != session.task
        bucket = slot.bucket
        if slot.session == session.number:
            session.fired_again(slot)
            return
        slot.session = session.number
        if bucket is None:
            session.fired_unplanned(slot, nested)
        elif nested and not slot.nested:
            session.hold(bucket)  # it may come again from the next inner backward
        else:
            if slot.eager:
                session.take(slot)
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.ready = now()
                session.launch_ready(self)

    def _open(self, *, outermost: bool) -> Session:
        task = seams.graph_task_id()
        session = self._session
        if session is not None:
            if not outermost or session.task == task:
                return session
            # The earlier backward died without telling anybody: drop what it left.
            self.abort(
                RuntimeError("an earlier backward ended without its end-of-backward callback")
            )
        self.release_storage()
        self.sessions += 1
        session = Session(self, self.sessions, task)
        if self.layout.options.tune and self.sessions == TUNE_AT and self.wire.carries_flags:
            session.arrivals = {}
        self._session = session
        seams.queue_end_of_backward(self._end_of_backward)
        return session

    def _end_of_backward(self) -> None:
        if self._session is None:
            return
        node = seams.enclosing_node()
        if node is not None:
            # The end of an inner backward only. If the outer end cannot be reached from here,
            # ``post_backward`` finishes the session.
            seams.run_at_end_of_outer(node, self._end_of_backward)
            return
        self.finalize()

    # What a finished session leaves

    def keep_totals(self, tail: Tensor) -> None:
        """Keep the reduced control tail, without reading it."""
        self._means = tail.clone()

    @property
    def totals(self) -> WindowTotals | None:
        """What the last reduced window amounted to over all ranks; ``None`` before the first.

        On an accelerator, reading this waits for the step; read it after the optimizer stepped.
        """
        if self._means is None:
            return None
        return WindowTotals.from_means(self._means.tolist(), self.group.world_size)

    def next_report(self, report: Report) -> Report | None:
        """Take this session's report; return the one to act on now: this one, or the one before.

        The first sessions of an accelerator are read at once too: that is when things are learnt.
        """
        if self.group.host_reads_are_free or self.sessions <= LEARNING_SESSIONS:
            return report
        previous, self._report = self._report, report
        return previous

    def defer(self, names: Sequence[str]) -> None:
        """Send the buckets of these parameters last from now on. Every rank must do the same."""
        for slot in self.registry.slots:
            if slot.name in names:
                slot.deferred = True
                if slot.bucket is not None:
                    slot.bucket.deferred = True

    def announce(self, buckets: Sequence[Bucket], agreement: Agreement) -> None:
        """Tell the wire and the log about new buckets."""
        if self.layout.forgotten:
            self.layout.remembered.clear()
            self.wire.forget()
        never = [self.registry.slots[n].name for n in sorted(agreement.unseen)]
        if never and self.group.rank == 0:
            log.info(
                "lean_ddp: %d trainable parameter(s) got no gradient on any rank in their first step:"
                " %s. Their .grad stays None, as on one device.",
                len(never),
                some_names(never),
            )
        log.debug(
            "lean_ddp: %d bucket(s) of %s MiB",
            len(buckets),
            ", ".join(f"{bucket.nbytes / 2**20:.2f}" for bucket in buckets),
        )

    @property
    def waiting_for(self) -> Bucket | None:
        """The bucket whose collective the host is waiting for, for a stall report."""
        session = self._session
        return session.waiting_for if session is not None else None
