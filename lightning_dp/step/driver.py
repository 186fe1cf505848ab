"""One training step between Lightning's hooks and the engine: weights, windows, checks, life time.

This file is longer than others because a step's hooks are read in the order in which they run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.registry import named_parameters
from lightning_dp.engine.reduction.failure import Supervision
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.reduction.window import AccumulationWindow
from lightning_dp.engine.replicas import start
from lightning_dp.engine.replicas.buffers import BufferKeeper
from lightning_dp.engine.replicas.digest import check_replicas
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.autograd import split_compiled_graphs
from lightning_dp.internals.lightning import pl
from lightning_dp.options import EngineOptions
from lightning_dp.step.accumulation import WindowKeeper
from lightning_dp.step.bucket_size import layout_options
from lightning_dp.step.fragments import Fragments
from lightning_dp.step.hook_choice import HookChoice
from lightning_dp.step.losses import LossWeights, mean_loss, reads_loss
from lightning_dp.step.noise import begin_norms, check_noise
from lightning_dp.step.optimizer_groups import OptimizerGroups
from lightning_dp.step.rounds import Rounds
from lightning_dp.step.step_watch import StepWatch
from lightning_dp.step.wire_choice import WireChoice
from lightning_dp.step.zero import ZeroState

log = logging.getLogger(__name__)


class StepDriver:
    """Owns the group, the window, the reducer and the buffers from set-up to tear-down.

    Args:
        options: Checked options.
        hook: A communication hook, or ``None``.
        state: Its state.
        wrapper: Wraps the hook.
        timeout: For collectives of the gradients' own group.
    """

    def __init__(
        self,
        options: EngineOptions,
        hook: Callable[..., Any] | None,
        state: object,
        wrapper: Callable[..., Any] | None,
        timeout: timedelta | None,
    ) -> None:
        self.options = options
        self.hook = HookChoice(hook, state, wrapper)
        self.wire = WireChoice(options, self.hook)
        self.rounds = Rounds(options, hook=self.hook.given)
        self.timeout = timeout
        self.window = AccumulationWindow(by_default=False)
        self.windows = WindowKeeper(self.window, options.incomplete_window, options.mid_window)
        self.zero = ZeroState(options)
        self._let_go()
        self.host_reads_are_free: bool | None = None  # for tests: False runs an accelerator's logic
        self.reduces_alone = False  # for tests and benchmarks: a world of one reduces as well
        self._averaged = False
        self._check_is_due = False
        self._steps = StepWatch(())
        self._supervision = Supervision()
        self._left_alone: set[str] = set()
        self._trained = False  # a batch has begun since set-up

    # Life time

    def _let_go(self) -> None:
        """Hold nothing of a fit."""
        self.group: ReplicaGroup | None = None
        self.reducer: Reducer | None = None
        self.keeper: BufferKeeper | None = None
        self.losses: LossWeights | None = None
        self.trainer: pl.Trainer | None = None
        self._module: pl.LightningModule | None = None
        self.optimizers = OptimizerGroups(())
        self.fragments = Fragments(1, self.optimizers, {})

    def open(
        self, module: pl.LightningModule, device: torch.device, supervision: Supervision
    ) -> None:
        """Make the group and make all replicas equal to rank 0's.

        Raises:
            ReplicaMismatchError: The ranks do not hold the same module.

        Collective: every rank. Blocks.
        """
        self._module = module
        self._supervision = supervision
        self.window.reset()
        self.window.position = self.window.step = 0
        trainer = trainer_seams.attached_trainer(module)
        if trainer is not None:
            self.windows.attach(trainer)  # before optimizers: a schedule may ask how many steps
        if self.group is None:
            with supervision.connecting():
                self.group = ReplicaGroup.create(
                    device,
                    self.timeout,
                    host_reads_are_free=self.host_reads_are_free,
                    alone=self.reduces_alone,
                    waiting=supervision.waiting,
                )
        self._left_alone = start.synchronize(module, self.group)

    def attach(self, optimizers: Sequence[Optimizer], trainer: pl.Trainer) -> None:
        """Hook the parameters; one partition of buckets per optimizer. Collective: every rank."""
        self.optimizers = OptimizerGroups(optimizers)
        self.trainer = trainer
        self.reducer = self._make_reducer(trainer)
        with self._supervision.connecting():
            self.zero.attach(self.reducer, self.timeout)
        self.rounds.connect(trainer, self.reducer, self.keeper, self.fragments)
        self.hook.restore(self.reducer)
        self._averaged = trainer_seams.averages_weights(trainer)
        self._steps = StepWatch(optimizers)
        self.steps = 0
        self._trained = False
        self.losses = LossWeights(self.window, self.reducer.group)

    def _make_reducer(self, trainer: pl.Trainer) -> Reducer:
        group, options = self.group, self.options
        assert group is not None
        assert self._module is not None
        self.zero.decide(self.optimizers, group, trainer)
        whole = not self.zero.own_gradients
        wire = self.wire.connect(group, trainer, self.timeout, self._supervision, gathers=whole)
        shared = isinstance(wire, SharedMemoryWire)
        slicing = self.zero.slicing(group)
        reduce = options.buffer_reduce if options.outer is None else "mean"
        outer = options.outer if group.reduces else None
        count = outer.get("fragments", 1) if outer is not None else 1
        self.fragments = Fragments(count, self.optimizers, named_parameters(self._module))
        self.keeper = BufferKeeper(self._module, group, options.buffers, reduce, self._left_alone)
        return Reducer(
            self._module,
            group,
            self.window,
            wire,
            layout_options(options, group.device, shared=shared, slicing=slicing),
            partition_of=self.fragments.partition,
            sliced=self.zero.sliced,
            deferred=options.deferred,
            check_finite=options.check_gradients,
            keeper=self.keeper,
            supervision=self._supervision,
        )

    def close(self) -> None:
        """Remove hooks and end the group; gradients and weights stay."""
        self.windows.detach()
        self._steps.close()
        self.zero.close()
        if self.reducer is not None:
            self.reducer.close()
        if self.group is not None:
            self.group.close()
        self._let_go()
        self.rounds.close()
        self.window.is_local = False
        self.hook.forget()

    def abort(self, error: BaseException) -> None:
        """Give up a step that this rank cannot finish; never raises."""
        self.zero.put_back()
        if self.reducer is not None:
            self.reducer.abort(error)

    @property
    def awaited(self) -> Bucket | None:
        """The bucket whose updated parameters the host waits for now."""
        return self.zero.waiting_for

    # One micro-batch

    @property
    def _automatic(self) -> bool:
        return self._module is not None and self._module.automatic_optimization

    @contextmanager
    def forward(self) -> Generator[None]:
        """Around a training step: equal buffers first, and compiled graphs that can overlap.

        In manual optimization its backwards reduce; in automatic optimization they are the user's own.
        """
        reducer = self.reducer
        if reducer is None:
            yield
            return
        if self._automatic:
            self.windows.note_forward()
        if not reducer.group.reduces:
            yield
            return
        self.rounds.before_step()
        if self.window.position == 0 and self.keeper is not None and not self.window.is_local:
            self.keeper.before_step()
        reducer.release_storage()
        here = not self._automatic and self.options.manual_sync == "each_backward"
        with (
            split_compiled_graphs(reducer.layout.options.cap_bytes),
            self.window.reducing(here),
            self._giving_up(reducer),
        ):
            yield
            if not self._automatic:
                self._step_ends()

    def weigh(self, output: Any) -> Any:
        """Read the weight of a training step's output; give a rank without a loss a zero one."""
        reducer, losses = self.reducer, self.losses
        if not self._automatic or reducer is None or losses is None:
            return output
        if self.window.micro_batches == 0:
            losses.begin_window(reducer.settled)
        return losses.weigh(output)

    def hooks(self) -> AbstractContextManager[None]:
        """Around hooks of callbacks and modules: a backward in them is not a reduction."""
        return self.window.reducing(False)

    @contextmanager
    def backward(self, loss: Tensor, scaled: Tensor) -> Generator[Tensor]:
        """Around one backward: yields the weighted loss; an exception reaches the other ranks.

        Args:
            loss: As the Trainer has it.
            scaled: The same, times the scale of a gradient scaler.

        Collective: every rank, if the window reduces.
        """
        reducer, losses = self.reducer, self.losses
        if reducer is None or losses is None:
            yield scaled
            return
        if self._automatic and self.trainer is not None:
            scaled = losses.weighted(loss, scaled, self.trainer.accumulate_grad_batches)
        else:
            self.windows.note_manual_backward()
        here = self._automatic or self.options.manual_sync == "each_backward"
        with self.window.reducing(here), self._giving_up(reducer):
            self._arm(reducer, scaled)
            yield scaled
            self.finish_backward()

    @contextmanager
    def _giving_up(self, reducer: Reducer) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            reducer.abort(error)
            raise

    def _arm(self, reducer: Reducer, loss: Tensor) -> None:
        self.rounds.before_step()  # once more: the training step may have unfrozen something
        scaler = self._scaler()
        if self.options.check_gradients != "off":
            # A loss scaler looks for the largest scale by overflowing, and skips those steps. With a
            # scale below one, what is not finite is not its doing. The host waits for the device.
            searching = scaler is not None and float(scaler.get_scale()) >= 1
            reducer.check_finite = "off" if searching else self.options.check_gradients
        self.zero.finish()
        begin_norms(reducer, scaler)
        reducer.arm(loss)

    def finish_backward(self) -> None:
        """After a backward: finish what autograd's callback could not."""
        reducer = self.reducer
        if reducer is None:
            return
        if reducer.is_open and not reducer.nested:
            reducer.finalize()
        elif self.window.ends_alone and not reducer.nested:
            self.rounds.end_window()
        if reducer.norms is not None:
            reducer.norms.end_backward(self.window)

    @contextmanager
    def inside_window(self) -> Generator[None]:
        """While in this context, backwards do not end the window."""
        if self.options.accum_sync == "every":
            before, self.window.ends = self.window.ends, False
            try:
                yield
            finally:
                self.window.ends = before
        else:
            with self.window.closed():
                yield

    # One optimizer step

    def closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Wrap the closure, which the precision plugin calls before it unscales, clips and steps."""
        reducer = self.reducer
        if reducer is None:
            return closure
        manual, on_step = not self._automatic, self.options.manual_sync == "on_step"

        def closed() -> Any:
            with self.window.reducing(manual and not on_step):
                output = closure()
            if manual and on_step and not self.window.is_local:
                reducer.reduce_now(self.fragments.of_optimizer(self.optimizers.index(optimizer)))
            else:
                self.finish_backward()
            free = reducer.group.host_reads_are_free and not manual
            if self.window.is_local or not reads_loss(optimizer, free):
                return output
            totals = None if manual else reducer.totals
            return mean_loss(output, totals, reducer.group)

        return closed

    def _scaler(self) -> Any:
        plugin = self.trainer.strategy.precision_plugin if self.trainer is not None else None
        return getattr(plugin, "scaler", None)

    def after_step(self) -> None:
        """Count the step; now and then compare replicas. Collective: every rank, at the same steps."""
        reducer = self.reducer
        if reducer is None:
            return
        stepped = self._steps.has_stepped()
        # Of local steps, schedules count attempts: a rank that skips one must not fall behind the others.
        self.windows.note_step(skipped=not stepped and not self.window.is_local)
        if self._automatic and self.trainer is not None and self.losses is not None:
            self.losses.after_step(self.trainer.global_step, lambda: reducer.totals)
        self.steps += 1
        if self._averaged:
            self.before_use(between_steps=True)
        every = self.options.check_replicas_every_n_steps
        self._check_is_due |= bool(every) and (self.steps == 1 or self.steps % every == 0)
        self.rounds.note_step()
        if self._automatic or not self.rounds.active:
            self._step_ends()

    def _step_ends(self) -> None:
        """After the steps of all optimizers: a meeting, if it is time. Collective: every rank."""
        if self.rounds.active and self.reducer is not None and self.trainer is not None:
            if not self._automatic and self._steps.has_stepped():
                self.rounds.note_step()  # behind the Trainer's back
            with self._giving_up(self.reducer):
                self.rounds.end_step(self.trainer)
        if self._check_is_due and self.rounds.comparable:
            self._check_is_due = False
            self.check_replicas()

    def check_replicas(self) -> None:
        """Compare replicas and optimizer settings: now and then, at the end of an epoch and of training.

        The latter also for steps that were taken behind the Trainer's back (a raw optimizer, one that steps
        inside the backward).

        Raises:
            ReplicaMismatchError: Names what differs, and the ranks.

        Collective: every rank, unless one is failing. Blocks; the host waits for the device.
        """
        if (
            self.reducer is not None
            and self.options.check_replicas_every_n_steps
            and self.rounds.comparable
            and not trainer_seams.is_unwinding(self.trainer)
        ):
            settings = self.optimizers.settings()
            with self.rounds.shown(copy=False):
                check_replicas(self.reducer, self.steps, self.options.on_mismatch, settings)

    def before_use(self, *, between_steps: bool = False) -> None:
        """Before somebody reads the module: act on the last step's reports, make buffers equal.

        Raises: as :meth:`Reducer.finalize`; a step that nobody follows is looked at here.

        Collective: every rank, unless one is failing.
        """
        if self.reducer is None:
            return
        if trainer_seams.is_unwinding(self.trainer):
            self.zero.give_up()
            return
        if self.rounds.mid_round:
            return  # others are shown the last meeting's values
        if not between_steps:
            self.zero.finish()
            self.reducer.settle()
        if self.keeper is not None:
            self.keeper.before_use(between_steps=between_steps)

    def measure_noise(self, every: int | None) -> None:
        """Take norms of gradients of one window in ``every``, or of none.

        Raises:
            ConfigError: This run has no noise scale that could be measured.
        """
        if self.reducer is None:
            return
        if every is not None:
            check_noise(
                self.options,
                automatic=self._automatic,
                parts=self.reducer.group.world_size * self.windows.most_steps,
            )
        self.reducer.take_norms(every)

    # Checkpoints

    def begin_training(self) -> None:
        """Restore a window that was saved half done; look at windows that will not fit. Local."""
        if self.reducer is not None:
            self.windows.restore(self.reducer)
            self.windows.say_misfits()
        self.rounds.begin_training(self.trainer)

    def end_training(self) -> None:
        """Finish the last round, prove replicas identical. Collective: every rank, unless one fails."""
        if self.reducer is not None and not trainer_seams.is_unwinding(self.trainer):
            with self._giving_up(self.reducer):
                self.rounds.end_training()
        self.check_replicas()

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add the window so far and the hook's state. Collective: every rank, unless one is failing."""
        if self.reducer is None:
            return
        self.rounds.add_to(checkpoint, self.trainer)
        if trainer_seams.is_unwinding(self.trainer):
            return
        window = self.windows.state(self.reducer) if not self.window.is_local else None
        if "optimizer_states" not in checkpoint:
            return
        if window is not None:
            checkpoint.setdefault("lean_ddp", {})["window"] = window
        self.hook.add_to(checkpoint, self.reducer)

    def remember(self, checkpoint: dict[str, Any], rank: int, world_size: int) -> None:
        """Keep what a loaded checkpoint says of its window, of the communication hook and of ``outer``."""
        self.rounds.remember(checkpoint, rank, world_size)
        self.windows.remember(checkpoint.get("lean_ddp", {}).get("window"))
        self.hook.remember(checkpoint)

    # Parameters that come later

    def before_batch(self, batch_idx: int) -> None:
        """Between two epochs prove replicas identical; look for new parameters there, and in new groups.

        Collective: every rank. Two small exchanges an epoch.
        """
        if self.reducer is None:
            return
        if batch_idx == 0 and self._trained:
            self.check_replicas()
        self._trained = True
        self.window.step += 1
        self.window.stop = self._supervision.asked_to_stop()
        self.windows.begin_batch(batch_idx, automatic=self._automatic)
        grown = self.optimizers.have_grown()
        if grown:
            self.reducer.registry.look_again()
        if grown or batch_idx == 0:
            self._take_in_new()
            if self.keeper is not None:
                self.keeper.refresh()

    def _take_in_new(self) -> None:
        assert self.reducer is not None
        assert self.group is not None
        assert self._module is not None
        missing = sorted(self.reducer.registry.missing())
        if not any(self.group.all_gather_object(missing)):
            return
        start.compare(self._module, self.group)
        parameters = dict(self._module.named_parameters())
        start.broadcast([parameters[name] for name in missing], self.group)
        self.reducer.add_parameters()
        log.info("lean_ddp: took in new parameters: %s", ", ".join(missing))
