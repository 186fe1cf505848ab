"""``LeanDDPStrategy``: follows the Trainer's life cycle and delegates; no arithmetic here.

This file is longer than others because the constructor documents every option of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.data_plane import DataOptions, DataPlane
from lightning_dp.engine.control import WindowTotals
from lightning_dp.engine.reduction.timing import ReductionTimes
from lightning_dp.faults.checkpoint_io import AtomicCheckpointIO
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.launch.options import FaultOptions
from lightning_dp.launch.run_controller import RunController
from lightning_dp.measure.stats import StepStats, step_stats
from lightning_dp.options import DDP_ONLY, EngineOptions, as_timedelta, refuse_unknown
from lightning_dp.registration import names, namespaces
from lightning_dp.step.batch_plan import batch_plan, check_keys, check_micro
from lightning_dp.step.driver import StepDriver
from lightning_dp.step.layer_sync import CPULayerSync

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import Accelerator

DEFAULT_TIMEOUT_S = 1800.0


class LeanDDPStrategy(DDPStrategy):
    """Data-parallel training of an unchanged LightningModule; by name: ``Trainer(strategy="lean_ddp")``.

    The module is replicated and never wrapped: ``state_dict`` keys, ``isinstance`` checks and methods
    other than ``forward`` stay as they are. All arguments are keyword-only and can be written in YAML.

    Args:
        bucket_cap_mb: About how many MiB of gradients make one message, or ``"auto"``: 25 in shared
            memory and on CUDA; otherwise chosen by measuring the first steps and the link, unless the
            Trainer is ``deterministic``.
        reduce_dtype: Type in which gradients are averaged, ``"fp32"`` or ``"bf16"``; ``None`` uses each
            gradient's own. ``float64`` always keeps its own.
        shared_memory: Ranks that all run on one machine's CPU average gradients through its memory;
            ``False`` sends them over the process group, as between machines.
        ddp_comm_hook: A hook of ``torch.distributed.algorithms.ddp_comm_hooks``, or any callable with
            the signature of one; works on every backend.
        ddp_comm_state: The hook's state.
        ddp_comm_wrapper: Wraps the hook (``fp16_compress_wrapper``).
        model_averaging_period: Steps between parameter averages of post-local SGD.
        deferred: Name patterns of parameters whose gradients are sent last. Needed only where an error
            says so.
        buffers: ``"lazy"`` makes buffers equal before they are used; ``"step"`` sends all of them
            before each step; ``"none"`` never after the start.
        buffer_reduce: Whether running statistics become rank 0's (``"broadcast"``) or the ``"mean"``.
        check_replicas_every_n_steps: Optimizer steps between two proofs that replicas are identical;
            0 for never.
        on_mismatch: ``"raise"`` if they are not, or ``"rebroadcast"`` rank 0's values.
        check_gradients: ``"warn"`` or ``"raise"`` if a rank's gradients are not finite, by name of rank
            and parameter, before they are averaged. Costs one pass over the gradients. With a loss
            scaler (``16-mixed``), which overflows on purpose and skips such steps, only while its scale
            is below 1.
        accum_sync: Average gradients once per accumulation ``"window"``, or after ``"every"``
            micro-batch.
        manual_sync: In manual optimization, average after ``"each_backward"``, or only ``"on_step"``:
            less traffic, but ``.grad`` is this rank's own until the optimizer steps.
        tail: What becomes of an incomplete accumulation window at an epoch's end: ``"step"`` with the
            right scale, ``"carry"`` it over, or ``"drop"`` it.
        mid_window: A checkpoint inside a window: ``"save"`` its partial gradients, or write at the next
            ``"boundary"``.
        batch: ``{"global": 512, "micro": 16, "accumulate": "auto"}``: samples per optimizer step over
            all ranks and nodes, samples per rank and micro-batch; sets ``accumulate_grad_batches``.
        iterable: What to do with an iterable dataset whose ranks get the same data: ``"warn"``,
            ``"error"``, ``"shard"`` it between ranks and workers, or leave it alone (``"off"``).
        uneven_train: Ranks whose training data ends at different steps end in an ``"error"`` that names
            them, or all stop with the first (``"min"``).
        eval_tail: Validation and test count each sample once (``"exact"``), or ``"pad"`` the last batches
            with repeated samples as ``ddp`` does.
        batch_size: A DataLoader's batch size counts ``"per_device"``, or is the ``"global"`` one of all
            ranks together.
        resume: Where an epoch cannot go on because seed or data changed, ``"auto"`` begins it anew and
            says so; ``"strict"`` is an error.
        strict_data: Make an error of what is otherwise a warning: fewer samples than ranks, samplers
            that differ between ranks.
        rank_rng: Random numbers differ between ranks in data loading ``"workers"``, or in ``"all"`` of
            training (dropout, augmentation in the main process).
        gather_predictions: ``trainer.predict`` returns all predictions on every rank, in the order of the
            dataset.
        start_method: How ranks start when nobody else starts them: ``"popen"`` runs the script again;
            ``"fork"``, ``"spawn"`` and ``"forkserver"`` run the Trainer's call in new processes.
        process_group_backend: ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Seconds (or a timedelta) after which a collective gives up.
        rendezvous_timeout_s: Seconds to wait at the start for ranks that are missing; they are named.
        error_grace_s: When a rank fails, the others are interrupted; after this many seconds their
            connections are cut, and after as many again they end themselves.
        stall_report_s: Seconds after which a wait for other ranks is reported, with who has not come;
            0 for never.
        preempt_signals: Signals, on any rank, that make all ranks stop at the same step.
        on_preempt: Then write a ``"checkpoint"`` where ``ckpt_path="last"`` finds it (none in a run with
            ``enable_checkpointing=False``) and end with exit code 143; or only ``"stop"``; or ``"ignore"``
            what Lightning does with these signals.
        find_unused_parameters: Accepted from configs of ``ddp``; does nothing.
        static_graph: Accepted from configs of ``ddp``; does nothing.
        gradient_as_bucket_view: Accepted from configs of ``ddp``; does nothing.
        broadcast_buffers: Accepted from configs of ``ddp``; does nothing.
        check_reduction: Accepted from configs of ``ddp``; does nothing.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, or your own.
        checkpoint_io: Set by the Trainer, or your own.
        precision_plugin: Set by the Trainer, or your own.

    Raises:
        TypeError: An argument that does not exist; names the nearest one.
        ConfigError: A value that is not possible.
    """

    is_distributed = True  # a plain fact: the parent's property warns

    def __new__(cls, *_: Any, **kwargs: Any) -> LeanDDPStrategy:
        """Refuse unknown arguments with the nearest name, for subclasses too."""
        refuse_unknown(cls.__init__, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        bucket_cap_mb: float | Literal["auto"] = "auto",
        reduce_dtype: Literal["fp32", "bf16"] | None = None,
        shared_memory: bool = True,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        deferred: Sequence[str] = (),
        buffers: Literal["lazy", "step", "none"] = "lazy",
        buffer_reduce: Literal["broadcast", "mean"] = "broadcast",
        check_replicas_every_n_steps: int = 1000,
        on_mismatch: Literal["raise", "rebroadcast"] = "raise",
        check_gradients: Literal["off", "warn", "raise"] = "off",
        accum_sync: Literal["window", "every"] = "window",
        manual_sync: Literal["each_backward", "on_step"] = "each_backward",
        tail: Literal["step", "carry", "drop"] = "step",
        mid_window: Literal["save", "boundary"] = "save",
        batch: Mapping[str, Any] | None = None,
        iterable: Literal["warn", "shard", "off", "error"] = "warn",
        uneven_train: Literal["error", "min"] = "error",
        eval_tail: Literal["exact", "pad"] = "exact",
        batch_size: Literal["per_device", "global"] = "per_device",
        resume: Literal["auto", "strict"] = "auto",
        strict_data: bool = False,
        rank_rng: Literal["workers", "all"] = "workers",
        gather_predictions: bool = False,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT_S,
        rendezvous_timeout_s: float = 120.0,
        error_grace_s: float = 3.0,
        stall_report_s: float = 30.0,
        preempt_signals: Sequence[str] = ("SIGTERM",),
        on_preempt: Literal["checkpoint", "stop", "ignore"] = "checkpoint",
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        broadcast_buffers: bool | None = None,
        check_reduction: bool | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.options = EngineOptions(
            bucket_cap_mb=bucket_cap_mb,
            reduce_dtype=reduce_dtype,
            deferred=tuple(deferred),
            buffers=buffers,
            buffer_reduce=buffer_reduce,
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            on_mismatch=on_mismatch,
            check_gradients=check_gradients,
            accum_sync=accum_sync,
            manual_sync=manual_sync,
            tail=tail,
            mid_window=mid_window,
            shared_memory=shared_memory,
        )
        data = DataOptions(
            iterable=iterable,
            uneven_train=uneven_train,
            eval_tail=eval_tail,
            batch_size=batch_size,
            resume=resume,
            rank_rng=rank_rng,
            gather_predictions=gather_predictions,
            strict_data=strict_data,
        )
        faults = FaultOptions(
            rendezvous_timeout_s=rendezvous_timeout_s,
            error_grace_s=error_grace_s,
            stall_report_s=stall_report_s,
            preempt_signals=tuple(preempt_signals),
            on_preempt=on_preempt,
        )
        check_keys(batch)
        self._batch = batch
        self._micro: int | None = None
        self._ported = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "check_reduction": check_reduction,
        }
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=as_timedelta("timeout", timeout),
            start_method=start_method,
        )
        self._engine = StepDriver(
            self.options, ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, self._timeout
        )
        self._data_plane = DataPlane(data, self._timeout)
        self._controller = RunController(faults, self._engine)
        self._atomic_io = AtomicCheckpointIO()

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
        return step_stats(reducer.times, reducer.totals, reducer.group.world_size)

    def watch_collectives(self, on: bool) -> ReductionTimes | None:
        """Take exact end times of collectives from now on, or no longer; returns the last session's.

        Costs a callback on the backend's thread per bucket: for timelines, not for training.
        """
        reducer = self._engine.reducer
        if reducer is None:
            return None
        reducer.exact_times = on
        return reducer.times

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
            is_global=self._data_plane.options.batch_size == "global",
        )
        return self._data_plane.process_dataloader(dataloader)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective: every rank. Blocks."""
        if self._controller.failing:
            return  # the others may never come
        self._data_plane.barrier(name)
        self._controller.barrier(name or "", super().barrier)

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
        what = "reduce" if group is None else ""
        return self._controller.while_waiting(what, call, tensor)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather from all ranks; ragged shares are padded. Collective: every rank. Blocks."""
        gather = partial(self._data_plane.all_gather, tensor, group, sync_grads=sync_grads)
        everyone = group is None or group is torch.distributed.group.WORLD
        what = "all_gather" if everyone else ""
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
        self._say_ported()
        if self.root_device.type == "cpu":
            trainer_seams.replace_layer_sync(self, CPULayerSync())
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._engine.attach(self.optimizers, trainer)

    def configure_ddp(self) -> None:
        """Make replicas equal; the module stays as it is.

        Collective: every rank. Blocks.
        """
        assert self.lightning_module is not None
        self._engine.open(self.lightning_module, self.root_device, self._controller.supervision)

    def _say_ported(self) -> None:
        given = [name for name, value in self._ported.items() if value is not None]
        self._ported = dict.fromkeys(self._ported)
        for name in given:
            rank_zero_info(f"lean_ddp: {name} does nothing here: {DDP_ONLY[name]}.")

    def setup_environment(self) -> None:
        """Start communicating; then work out the accumulation, before optimizers are configured.

        Raises:
            ConfigError: ``batch`` contradicts itself, the number of ranks or the Trainer.
        """
        super().setup_environment()
        trainer = trainer_seams.attached_trainer(self.lightning_module)
        if trainer is not None and self._batch is not None:
            steps, self._micro = batch_plan(
                self._batch, self.world_size, trainer.accumulate_grad_batches
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
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Stop here if a rank was asked to. Collective: every rank."""
        super().on_validation_end()
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
        """Make buffers equal, save what waited for it. Collective: every rank."""
        self._engine.before_use()
        self._engine.windows.save_postponed()
        self._data_plane.end_training()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's plain ``state_dict``. Collective: every rank, while fitting."""
        self._engine.before_use()
        return super().lightning_module_state_dict()

    # Checkpoints

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
        if self._engine.windows.postpone(
            filepath, "optimizer_states" not in checkpoint, storage_options
        ):
            return
        self._engine.add_to(checkpoint)
        # After the window's entry, which decides where the data goes on.
        self._data_plane.save_checkpoint(checkpoint, self._engine.windows.waiting)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load, and keep what the strategy put in. Every rank calls it."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._engine.remember(checkpoint)
        self._data_plane.load_checkpoint(checkpoint)
        return checkpoint

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Let go of a step that was going on."""
        self._engine.abort(exception)

    def teardown(self) -> None:
        """Remove every hook, then as the parent."""
        self._engine.close()
        self._data_plane.teardown()
        super().teardown()

    # Names

    def __repr__(self) -> str:
        return namespaces.describe(self)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``lean_ddp`` and its variants; a second call changes nothing."""
        names.register(strategy_registry, cls)


LeanDDPStrategy.register_strategies(StrategyRegistry)
