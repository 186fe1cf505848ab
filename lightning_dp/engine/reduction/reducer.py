"""The reducer: hooks that open reductions, and what is done about a reduction's outcome.

    IDLE --(loss or first gradient of an armed backward)--> OPEN --(end of the outermost backward)--> IDLE

[Note: which backward reduces] Hooks stand on every parameter and see every backward. One that runs while
``window.reduces`` is false is local: an inner backward of a training step, one in validation, in a
callback. Whoever knows the trainer's life opens the window around the backwards that are a reduction, and
around nothing else.

[Note: why the end is in autograd's callback] Lightning calls ``on_after_backward`` before the strategy's
``post_backward``. Waiting in the callback, which runs before ``backward`` returns, shows averaged
gradients to hooks, loggers and clipping. ``post_backward`` is the safety net where there is no callback.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from lightning_dp.engine.bucket import UNCUT, Bucket, Slot
from lightning_dp.engine.control import Control, Reading, WindowTotals, steps_differ
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import Layout, LayoutOptions
from lightning_dp.engine.plan.registry import Registry
from lightning_dp.engine.plan.retune import TUNE_AT, retune
from lightning_dp.engine.reduction import copies
from lightning_dp.engine.reduction.failure import Supervision, raise_if_failed, raise_late
from lightning_dp.engine.reduction.finite import say_non_finite
from lightning_dp.engine.reduction.norms import GradientNorms
from lightning_dp.engine.reduction.opening import raise_mismatch
from lightning_dp.engine.reduction.parts import Outcome, Parts
from lightning_dp.engine.reduction.reduction import Reduction
from lightning_dp.engine.reduction.timing import ReductionTimes
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.wire import Wire
from lightning_dp.errors import ConfigError, some_names
from lightning_dp.internals import autograd as seams

log = logging.getLogger(__name__)

LEARNING_REDUCTIONS = (
    3  # on an accelerator these are read at once too: that is when things are learnt
)


class Reducer:
    """Averages gradients of one module over replicas while the backward goes on.

    Args:
        module: The user's module; never wrapped, nothing is stored on it or on its parameters.
        group: Who takes part.
        window: Says whether a backward reduces, and what it weighs.
        wire: How buckets travel; default: one all-reduce each.
        options: How buckets are cut.
        partition_of: Tells a number by name and parameter; those with different ones never share a bucket
            (one per optimizer, so that a GAN's discriminator is not sent with its generator).
        sliced: Tells by name and parameter whether its optimizer updates slices of buckets.
        deferred: Name patterns of parameters to send last from the start (``"decoder.*"``).
        check_finite: ``"off"``, ``"warn"`` or ``"raise"``: look at local gradients before they are sent.
        keeper: Who keeps buffers equal; its news travel in the control block.
        supervision: Who watches over the ranks.

    """

    def __init__(
        self,
        module: nn.Module,
        group: ReplicaGroup,
        window: AccumulationWindow,
        wire: Wire | None = None,
        options: LayoutOptions | None = None,
        *,
        partition_of: Callable[[str, nn.Parameter], int] = lambda *_: 0,
        sliced: Callable[[str, nn.Parameter], bool] = lambda *_: False,
        deferred: Sequence[str] = (),
        check_finite: str = "off",
        keeper: BufferKeeper | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self.group, self.window = group, window
        self.wire: Wire = wire if wire is not None else AllReduceWire(group)
        options = options or LayoutOptions()
        if self.wire.slicing != UNCUT:
            options = replace(options, slicing=self.wire.slicing)
        self.layout = Layout(group.device, options)
        self.registry = Registry(module, group.device, partition_of, sliced)
        self.deferred, self.check_finite = tuple(deferred), check_finite
        self.norms: GradientNorms | None = None
        self.times: ReductionTimes | None = None
        self.exact_times = False
        self.reductions = 0
        self.openings = 0  # how many of them began with a comparison
        watch = supervision or Supervision()
        self._parts = Parts(group, window, self.wire, self.layout, self.registry, keeper, watch)
        self._reduction: Reduction | None = None
        self._sent: Reduction | None = None  # is under way while other backwards run
        self._known: dict[frozenset[int] | None, frozenset[int]] = {}  # sent last, by partitions
        self._passed: frozenset[int | str] = frozenset()  # trained earlier in the window
        self._unread: tuple[Reading, Outcome, int, float] | None = None
        self._last: tuple[Reading, float] | None = None  # the last control block and its reference
        self.settled: WindowTotals | None = None
        self._handles: dict[int, Any] = {}  # by slot number
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
        if self.norms is not None:
            self.norms.watch(new)
        return [slot.name for slot in new]

    def close(self) -> None:
        """Remove every hook and let go of all storage; gradients stay valid."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.take_norms(None)
        self.wire.close()
        self._reduction = self._sent = None
        for slot in self.registry.slots:
            slot.bucket = slot.view = slot.grad_view = slot.local_grad = None
        self.layout.buckets.clear()

    def release_storage(self) -> int:
        """Give back the memory of buckets in which no gradient lives; return the bytes.

        Called before a forward, and before a backward: Lightning zeroes gradients between the two, and
        that is when activations need most memory. Buckets of many small gradients keep theirs, unless
        somebody kept one of these gradients.
        """
        if self._reduction is not None:
            return 0
        busy = self._sent.sequence if self._sent is not None else ()
        buckets = [b for b in self.layout.buckets if b not in busy and b.should_release()]
        return sum(bucket.nbytes for bucket in buckets if bucket.release())

    def take_norms(self, every: int | None) -> None:
        """Take norms of one window in ``every``, or of none. Every rank, between windows."""
        if self.norms is not None:
            self.norms.close()
        factor = self.wire.predivide_factor
        self.norms = GradientNorms(self.group, factor, every) if every is not None else None
        if self.norms is not None:
            self.norms.watch(self.registry.slots)

    # One backward

    @property
    def is_open(self) -> bool:
        """Whether a reducing backward has begun and not ended."""
        return self._reduction is not None

    @property
    def nested(self) -> bool:
        """Whether this is called from inside a backward that is still running."""
        return seams.enclosing_node() is not None

    def arm(self, loss: Tensor) -> None:
        """Open a reduction when the backward of ``loss`` begins, if the window reduces.

        The loss's own hook runs first and in the outermost graph task, also for a loss that reaches no
        parameter: a rank without work still takes part.

        Args:
            loss: Any shape; a loss without gradient is left alone.
        """
        self.release_storage()  # not only when the first gradient arrives: then activations are gone
        if not self.window.reduces:
            new = (slot.name for slot in self.registry.unplanned() if slot.param.requires_grad)
            self._passed |= {*self.layout.live(None), *new}
        elif loss.requires_grad:
            ref = weakref.ref(self)

            def on_loss(_grad: Tensor) -> None:
                reducer = ref()
                if reducer is not None and reducer.window.reduces:
                    reducer._open(outermost=True)

            loss.register_hook(seams.not_traced(on_loss))  # type: ignore[no-untyped-call]

    def reduce_now(self, partitions: frozenset[int] | None = None) -> None:
        """Average the gradients that are there, outside of any backward.

        Args:
            partitions: Only buckets of these partitions; ``None`` means all.

        Collective: every rank, once per call. Blocks (on CUDA: the stream only). Nothing overlaps.
        """
        if self._reduction is None and not self.nested:
            self._begin(-1, partitions)
        self.finalize()

    def send_now(self, partitions: frozenset[int] | None = None) -> bool:
        """Begin what :meth:`reduce_now` does; other windows, of this rank's own, may follow.

        Returns:
            Whether they are under way, for :meth:`receive`. Otherwise ranks had to plan, and it is done.

        Collective: every rank, once per call. Blocks only while ranks agree.
        """
        assert self._sent is None
        reduction = self._begin(-1, partitions)
        under_way = reduction.send()
        if under_way:
            reduction.keep_window()
            self._sent, self._reduction = reduction, None
            self.window.reset()
        else:
            self.finalize()
        return under_way

    def poll(self) -> None:
        """Move on what is under way, where that is not done in the background. Does not block."""
        for _, work in self._sent.in_flight if self._sent is not None else ():
            getattr(work, "is_completed", bool)()

    def receive(self) -> None:
        """Wait for what :meth:`send_now` sent; ``.grad`` holds the means. Raises: as :meth:`finalize`.

        Collective: every rank, at the same step. Blocks (on CUDA: the stream only).
        """
        self._reduction, self._sent = self._sent, None
        self.finalize()

    def end_alone(self) -> None:
        """End a window that is this rank's own: its mean gradients stay in ``.grad``. Local."""
        copies.scale((slot.param.grad for slot in self.registry.slots), self.window.own_factor())
        self.window.reset()

    def finalize(self) -> None:
        """Finish an open reduction: launch what is left, wait, give gradients back. Idempotent.

        Raises:
            RankFailedError: Another rank's backward raised.
            LateGradientError: A gradient came after its bucket had left, on any rank.
            NonFiniteGradientError: ``check_finite="raise"`` and some rank's gradients are not finite.
            ReplicaMismatchError: Ranks differ in what is trainable, or are in different backwards.

        Collective: every rank, once per reduction. Blocks (on CUDA: the stream only).
        """
        reduction = self._reduction
        if reduction is None:
            return
        try:
            outcome = reduction.finish()
            self._known[reduction.partitions] = reduction.live
            self._act(outcome, reduction.window)
            if reduction.arrivals is not None:
                times = reduction.times
                timed = reduction.arrivals, times.begin, times.backward_end, self.wire.ratio
                retune(self.layout, self.registry, self.group, reduction.sequence, *timed)
                self.wire.forget()
            if self._passed:
                waiting = {slot.name for slot in self.registry.unplanned()}
                left = self._passed - reduction.live
                self._passed = frozenset(p for p in left if isinstance(p, int) or p in waiting)
            if outcome.new_buckets or reduction.arrivals is not None:
                self._known = {reduction.partitions: self.layout.live(reduction.partitions)}
        except BaseException:
            copies.clear(self.registry.slots)
            raise
        finally:
            self._reduction = None
            self.times = reduction.times
            if self.window.ends:
                self.window.reset()

    def abort(self, error: BaseException) -> None:
        """Give up an open reduction because this rank's backward raised.

        The error is published, the remaining buckets are sent as zeros with the error flag, so that the
        other ranks end their step with an error that names this rank, and the engine is usable
        afterwards.

        Collective: completes the reduction's collectives. Waits a few seconds at most, never raises.
        """
        reduction, self._reduction = self._reduction, None
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.abandon()  # all of it has left: nobody waits for more
        if reduction is None:
            return
        self._passed = frozenset()
        self._parts.supervision.failed(error)
        reduction.give_up(error)
        self.window.reset()

    # Hooks

    def _attach(self, slots: Sequence[Slot]) -> None:
        if not self.group.reduces:
            return
        self.layout.defer(
            [s.name for s in slots if any(fnmatch(s.name, pattern) for pattern in self.deferred)],
            slots,
        )
        for slot in slots:
            if slot.param.is_inference():
                continue  # autograd refuses it: it can never be trained
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
                reduction = reducer._reduction
                if reduction is None:
                    reduction = reducer._open(outermost=False)
                reduction.gradient_ready(slot)

        return seams.not_traced(on_gradient)

    def _open(self, *, outermost: bool) -> Reduction:
        task = seams.graph_task_id()
        reduction = self._reduction
        if reduction is not None:
            if not outermost or reduction.task == task:
                return reduction
            # The earlier backward died without telling anybody: drop what it left.
            self.abort(
                RuntimeError("an earlier backward ended without its end-of-backward callback")
            )
        if not outermost:  # otherwise that was done when the loss was seen
            self.release_storage()
        reduction = self._begin(task, None)
        tunes = self.layout.options.tune and not self.wire.keyed_by_bucket
        if tunes and self.reductions == TUNE_AT:
            reduction.arrivals = {}
        seams.queue_end_of_backward(self._end_of_backward)
        return reduction

    def _begin(self, task: int, partitions: frozenset[int] | None) -> Reduction:
        self.settle()  # before anything is sent: what raises must raise on all ranks alike
        self.reductions += 1
        checked = self.check_finite != "off"
        self._reduction = Reduction(
            self._parts,
            self.reductions,
            task,
            partitions,
            known=self._known.get(partitions),
            passed=self._passed,
            check_finite=checked,
            norms=self.norms,
            zero_bad=self.check_finite == "raise" and not self.group.host_reads_are_free,
            times=ReductionTimes(exact=self.exact_times),
        )
        self.openings += self._reduction.opens
        return self._reduction

    def _end_of_backward(self) -> None:
        if self._reduction is None:
            return
        node = seams.enclosing_node()
        if node is not None:
            # The end of an inner backward only. If the outer end cannot be reached from here,
            # ``post_backward`` finishes the reduction.
            seams.run_at_end_of_outer(node, self._end_of_backward)
            return
        self.finalize()

    # What a finished reduction leaves

    def _act(self, outcome: Outcome, window: AccumulationWindow) -> None:
        """Keep the totals; act on the control block, now or, on an accelerator, before the next reduction.

        Collective: every rank exchanges names, only if something was reported. Blocks then.
        """
        if outcome.agreement is not None:
            self._announce(outcome)
        if outcome.stop:
            self._parts.supervision.stopped()
        if outcome.control is None:
            return
        read_now = self.group.host_reads_are_free or self.reductions <= LEARNING_REDUCTIONS
        self._last = outcome.control, window.reference
        self._unread = outcome.control, outcome, window.step, window.reference
        outcome.control.leave(read=read_now)
        if read_now:
            self.settle()

    def settle(self) -> None:
        """Act on the last control block, if that has not been done yet.

        Raises: as :meth:`finalize`.

        Collective: every rank, at the same place; exchanges names only if something was reported.
        """
        if self._unread is None:
            return
        (reading, outcome, step, reference), self._unread = self._unread, None
        means, group = reading.means(), self.group
        self.settled = WindowTotals.from_means(means, group.world_size, reference)
        if means[Control.STOP] > 0:
            self._parts.supervision.stopped()
        if not group.reduces:
            return
        raise_if_failed(means, group.rank, group.world_size, f"batch {step}")
        if steps_differ(means):
            raise_mismatch(group, step, ())
        if not means[Control.WEIGHT] >= 0:
            raise ConfigError(
                f"[rank {group.rank}] a rank's loss_weight in batch {step} was below zero or not finite; it"
                " is the number of samples or tokens behind the mean loss: one finite number, 0 or more."
            )
        if means[Control.LATE] > 0:
            raise_late(outcome.late, group, self.layout, self.registry.slots)
        if means[Control.NON_FINITE] > 0 and outcome.finite is not None:
            say_non_finite(outcome.finite.names(), group, raises=self.check_finite == "raise")
        if means[Control.BUFFERS] > 0 and self._parts.buffers is not None:
            self._parts.buffers.learn(outcome.buffers)

    @property
    def totals(self) -> WindowTotals | None:
        """What the last reduced window amounted to over all ranks; ``None`` before the first.

        On an accelerator, reading this waits for the step; read it after the optimizer stepped.
        """
        if self._last is None:
            return None
        reading, reference = self._last
        return WindowTotals.from_means(reading.means(), self.group.world_size, reference)

    def _announce(self, outcome: Outcome) -> None:
        """Tell the wire and the log about new buckets."""
        assert outcome.agreement is not None
        if self.layout.forgotten:
            self.layout.remembered.clear()
            self.wire.forget()
        never = [self.registry.slots[n].name for n in sorted(outcome.agreement.unseen)]
        if never and self.group.rank == 0:
            log.info(
                "lean_ddp: %d trainable parameter(s) got no gradient on any rank in their first step:"
                " %s. Their .grad stays None, as on one device.",
                len(never),
                some_names(never),
            )
        log.debug(
            "lean_ddp: %d bucket(s) of %s MiB",
            len(outcome.new_buckets),
            ", ".join(f"{bucket.nbytes / 2**20:.2f}" for bucket in outcome.new_buckets),
        )

    @property
    def begun(self) -> int:
        """Reductions whose buckets have begun to leave, for a stall report."""
        waiting = self._reduction is not None and self._reduction.launched == 0
        return self.reductions - waiting

    @property
    def is_opening(self) -> bool:
        """Whether the host waits for the ranks to say what they send, for a stall report."""
        return self._reduction is not None and self._reduction.is_opening

    @property
    def waiting_for(self) -> Bucket | None:
        """The bucket whose collective the host is waiting for, for a stall report."""
        reduction = self._reduction
        return reduction.waiting_for if reduction is not None else None
