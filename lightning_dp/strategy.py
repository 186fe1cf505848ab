"""``LeanDDPStrategy``: follows the Trainer's life cycle and delegates; no arithmetic here.

This file is longer than others because the constructor documents every option of the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.data_plane.plane import DataPlane
from lightning_dp.engine.control import WindowTotals
from lightning_dp.engine.reduction.timing import ReductionTimes
from lightning_dp.faults.checkpoint_io import AtomicCheckpointIO
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.binding import refuse_other_owner
from lightning_dp.internals.lightning import (
    CheckpointIO,
    DDPStrategy,
    StrategyRegistry,
    TrainerFn,
    pl,
)
from lightning_dp.internals.stacks import logged_name
from lightning_dp.launch.run_controller import RunController
from lightning_dp.measure.stats import StepStats, step_stats
from lightning_dp.options import Options, refuse_unknown, takes
from lightning_dp.registration import names
from lightning_dp.step.batch_plan import batch_plan, check_micro
from lightning_dp.step.best_paths import compare_best_paths
from lightning_dp.step.driver import StepDriver
from lightning_dp.step.layer_sync import CPULayerSync
from lightning_dp.step.zero_parts import put_masters_back, read_parts


class LeanDDPStrategy(DDPStrategy):
    """Data-parallel training of an unchanged LightningModule; by name: ``Trainer(strategy="lean_ddp")``.

    The module is replicated and never wrapped: ``state_dict`` keys, ``isinstance`` checks and methods
    other than ``forward`` stay as they are. :mod:`lightning_dp.options` documents the arguments, as does
    ``help(LeanDDPStrategy)``.

    Raises:
        TypeError: An argument that does not exist; names the nearest one.
        ConfigError: A value that is not possible.
    """

    is_distributed = True  # a plain fact: the parent's property warns

    @takes(Options)
    def __init__(self, **arguments: Any) -> None:
        """All arguments are keyword-only and can be written in YAML."""
        refuse_unknown(arguments, inspect.signature(type(self)).parameters)
        self.options = options = Options(**arguments)
        self._micro: int | None = None
        super().__init__(**options.of_ddp())
        hook = options.ddp_comm_hook, options.ddp_comm_state, options.ddp_comm_wrapper
        self._undo_no_sync: Callable[[], None] | None = None
        self._engine = StepDriver(options, *hook, self._timeout)
        self._controller = RunController(options, self._engine)
        self._data_plane = DataPlane(options, self._timeout, self._controller.waiting)
        self._atomic_io = AtomicCheckpointIO()
        self._atomic_io.maps = bool(options.zero)  # a rank needs a part of what is in a file

    # What users may ask

    @property
    def window_totals(self) -> WindowTotals | None:
        """The last accumulation window over all ranks: weight, micro-batches, mean loss."""
        reducer = self._engine.reducer
        return reducer.totals if reducer is not None else None

    def step_stats(self) -> StepStats | None:
        """What the last reduction cost; ``None`` before the first. On an accelerator, waits for it."""
        reducer = self._engine.reducer
        if reducer is None or reducer.times is None:
            return None
        held = self.optimizer_state_bytes
        return step_stats(reducer.times, reducer.totals, reducer.group.world_size, held)

    @property
    def optimizer_state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds; with ``zero``, its share."""
        return self._engine.zero.state_bytes

    def watch_collectives(self, on: bool) -> ReductionTimes | None:
        """Take exact end times of collectives from now on, or no longer; returns the last session's.

        Costs a callback on the backend's thread per bucket: for timelines, not for training.
        """
        reducer = self._engine.reducer
        if reducer is None:
            return None
        reducer.exact_times = on
        return reducer.times

    def measure_noise(self, every: int | None) -> None:
        """Take the norms that ``NoiseScale`` needs in one step of ``every``, or in none. Every rank.

        Raises:
            ConfigError: This run has no noise scale that could be measured.
        """
        self._engine.measure_noise(every)

    @property
    def settled_totals(self) -> WindowTotals | None:
        """The last window that was read without waiting: this one, or on an accelerator the one before."""
        reducer = self._engine.reducer
        return reducer.settled if reducer is not None else None

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``, by rank. Collective: every rank. Blocks."""
        group = self._engine.group
        return group.all_gather_object(value) if group is not None else [value]

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """In manual optimization: a backward in this context does not average its gradients.

        Leave the context for the last backward before the optimizer steps: its average covers all.
        """
        with self._engine.window.closed():
            yield

    def gather_ragged(self, rows: Tensor, dataloader_idx: int = 0) -> Tensor:
        """Return all ranks' rows of an evaluation, one for each sample, in the order of the dataset.

        Args:
            rows: This rank's, shape ``(n, ...)``, in the order in which its samples came; ``n`` may differ
                between ranks.
            dataloader_idx: Which evaluation loader they belong to.

        Returns:
            Shape ``(all samples, ...)``, the same on every rank, each sample once.

        Raises:
            ConfigError: A rank has more rows than samples.

        Collective: every rank, outside ``validation_step`` and ``test_step``. Blocks.
        """
        return self._data_plane.gather_ragged(rows, dataloader_idx)

    # Data

    def connect(self, model: pl.LightningModule) -> None:
        """Attach the module; sampling is ours from here on."""
        super().connect(model)
        self._data_plane.connect(model)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a user's own DistributedSampler would have to be made."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: object) -> object:
        """Give a loader this rank's share. Collective: every rank, for each loader in turn."""
        check_micro(
            dataloader,
            self._micro,
            self.lightning_module,
            self.world_size,
            is_global=self.options.batch_size == "global",
        )
        return self._data_plane.process_dataloader(dataloader)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective: every rank. Blocks."""
        if self._controller.failing:
            return  # the others may never come
        self._controller.barrier(name or "", super().barrier)
        self._data_plane.barrier(name)  # may make a group, in which nobody can be interrupted

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Take rank ``src``'s object. Collective: every rank. Blocks."""
        plain = super().broadcast
        return self._controller.while_waiting("broadcast", lambda: plain(obj, src), obj)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over ranks; a mean of integers is not rounded. Collective: every rank. Blocks."""
        plain = partial(super().reduce, group=group, reduce_op=reduce_op)

        def call() -> Any:
            return self._data_plane.reduce(tensor, reduce_op, plain)

        # A user's group leaves ranks out, whose collectives are then numbered differently.
        what = ""
        if group is None and isinstance(tensor, Tensor):
            name = logged_name()
            what = f"reduce of {name!r} " if name else "reduce "
            what += f"{tuple(tensor.shape)} {tensor.dtype}"
        return self._controller.while_waiting(what, call, tensor)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather from all ranks; ragged shares are padded. Collective: every rank. Blocks."""
        gather = partial(self._data_plane.all_gather, tensor, group, sync_grads=sync_grads)
        everyone = group is None or group is torch.distributed.group.WORLD
        what = f"all_gather {tensor.dtype}" if everyone else ""
        return self._controller.while_waiting(what, gather, tensor.unsqueeze(0))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``."""
        with self._data_plane.evaluation_step():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step``."""
        with self._data_plane.evaluation_step():
            return super().test_step(*args, **kwargs)

    def on_predict_end(self) -> None:
        """Merge predictions, if asked to. Collective: every rank."""
        super().on_predict_end()
        self._data_plane.predict_ends()
        self._controller.evaluation_ends()

    # Processes

    def _configure_launcher(self) -> None:
        self._launcher = self._controller.make_launcher(self, self._start_method)

    def setup_distributed(self) -> None:
        """Meet the other ranks and begin to watch over them. Collective: every rank. Blocks."""
        self._controller.setup_distributed(self, super().setup_distributed)

    # Set-up

    def setup(self, trainer: pl.Trainer) -> None:
        """Place the module, make replicas equal, create optimizers, attach the engine.

        Collective: every rank. Blocks.
        """
        if self.root_device.type == "cpu":
            trainer_seams.replace_layer_sync(self, CPULayerSync())
        self._engine.zero.check_io(self.checkpoint_io)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._engine.attach(self.optimizers, trainer)

    def configure_ddp(self) -> None:
        """Make replicas equal; the module stays as it is.

        Collective: every rank. Blocks.
        """
        assert self.lightning_module is not None
        self._undo_no_sync = trainer_seams.offer_no_sync(self.lightning_module, self.accumulate)
        # Nobody can be interrupted while groups are made: all are here first.
        self.barrier("set-up")
        self._engine.open(self.lightning_module, self.root_device, self._controller.supervision)

    def setup_environment(self) -> None:
        """Start communicating; then work out the accumulation, before optimizers are configured.

        Raises:
            ConfigError: ``batch`` contradicts itself, the number of ranks or the Trainer.
        """
        super().setup_environment()
        trainer = trainer_seams.attached_trainer(self.lightning_module)
        if trainer is not None and self.options.batch is not None:
            steps, self._micro = batch_plan(
                self.options.batch, self.world_size, trainer.accumulate_grad_batches
            )
            trainer.accumulate_grad_batches = steps

    # A step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take in parameters that appeared since, at an epoch's start.

        Collective: every rank at ``batch_idx`` 0.
        """
        super().on_train_batch_start(batch, batch_idx)
        self._data_plane.batch_begins()
        self._engine.before_batch(batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``; a rank without a loss takes part with weight 0."""
        with self._engine.forward():
            output = super().training_step(*args, **kwargs)
        return self._engine.weigh(output)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Back-propagate the weighted loss; gradients are averaged before ``on_after_backward``.

        Hooks see the user's loss, and a backward of their own is no reduction.

        Collective: every rank, if the window reduces.
        """
        module = self.lightning_module
        assert module is not None
        with self._engine.hooks():
            scaled = self.precision_plugin.pre_backward(closure_loss, module)
        with self._engine.backward(closure_loss, scaled) as loss:
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        with self._engine.hooks():
            return self.precision_plugin.post_backward(scaled, module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """While in this context, a backward belongs to a window that goes on."""
        with self._engine.inside_window():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; then, now and then, prove that replicas are identical.

        Collective: every rank.
        """
        closure = self._engine.closure(closure, optimizer)
        with self._engine.hooks():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._engine.after_step()
        return output

    # Statistics are made equal before somebody reads them

    def on_validation_start(self) -> None:
        """Make buffers equal. Collective: every rank."""
        self._controller.evaluation_starts()
        self._engine.before_use()
        self._engine.rounds.show_equal()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Stop here if a rank was asked to. Collective: every rank."""
        super().on_validation_end()
        self._engine.rounds.show_own()
        self._controller.evaluation_ends()

    def on_test_start(self) -> None:
        """Make buffers equal. Collective: every rank."""
        self._controller.evaluation_starts()
        self._engine.before_use()
        super().on_test_start()

    def on_test_end(self) -> None:
        """Stop here if a rank was asked to. Collective: every rank."""
        super().on_test_end()
        self._controller.evaluation_ends()

    def on_predict_start(self) -> None:
        """Make buffers equal. Collective: every rank."""
        self._controller.evaluation_starts()
        self._engine.before_use()
        super().on_predict_start()

    def on_train_start(self) -> None:
        """Put back the window that a checkpoint was saved in. Local."""
        super().on_train_start()
        self._data_plane.begin_training()
        self._engine.begin_training()

    def on_train_end(self) -> None:
        """Prove replicas identical, make buffers equal, save what waited for it. Collective: every rank."""
        self._engine.end_training()
        trainer = trainer_seams.attached_trainer(self.lightning_module)
        if trainer is not None:
            compare_best_paths(trainer, self.gather_objects)
        self._engine.before_use()
        self._engine.windows.save_postponed()
        self._data_plane.end_training()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's plain ``state_dict``. Collective: every rank, while fitting."""
        self._engine.before_use()
        with self._engine.rounds.shown():
            return super().lightning_module_state_dict()

    # Checkpoints

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's whole state; where it is in shares, on rank 0 only.

        Collective: every rank, with ``zero``. Blocks.
        """
        whole = self._engine.zero.state_dict(optimizer)
        return whole if whole is not None else super().optimizer_state(optimizer)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes checkpoints atomically, unless a plugin was given."""
        return run_seams.checkpoint_io(self, self._atomic_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Add what only the strategy knows, then save on rank 0. Collective: every rank."""
        if self._controller.only_launches:
            return  # the ranks that failed were other processes; nothing of theirs is here
        if self._engine.zero.forbids_saving(checkpoint, filepath):
            return
        if self._engine.windows.postpone(
            filepath, "optimizer_states" not in checkpoint, storage_options
        ):
            return
        self._engine.add_to(checkpoint)
        # After the window's entry, which decides where the data goes on.
        self._data_plane.save_checkpoint(checkpoint, self._engine.windows.waiting)
        self._engine.zero.add_to(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load, and keep what the strategy put in. Every rank calls it."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        trainer = trainer_seams.attached_trainer(self.lightning_module)
        if trainer is None or trainer.state.fn == TrainerFn.FITTING:
            ranks = self.global_rank, self.world_size
            read_parts(checkpoint, checkpoint_path, *ranks, weights_only)
            put_masters_back(checkpoint)
        self._engine.remember(checkpoint, self.global_rank, self.world_size)
        self._data_plane.load_checkpoint(checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, each rank its parts. Every rank calls it."""
        plain = super().load_optimizer_state_dict
        self._engine.zero.load(
            checkpoint["optimizer_states"], lambda states: plain({"optimizer_states": states})
        )

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Let go of a step that was going on."""
        self._engine.abort(exception)

    def teardown(self) -> None:
        """Remove every hook, then as the parent."""
        if self._undo_no_sync is not None:
            self._undo_no_sync()
        self._engine.close()
        self._data_plane.teardown()
        super().teardown()

    # Names

    def __repr__(self) -> str:
        refuse_other_owner()
        return super().__repr__()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``lean_ddp`` and its variants; a second call changes nothing."""
        names.register(strategy_registry, cls)


LeanDDPStrategy.register_strategies(StrategyRegistry)
