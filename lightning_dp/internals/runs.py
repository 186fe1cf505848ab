"""Every private name of Lightning that starting and stopping a run touches.

As :mod:`lightning_dp.internals.trainer`: one small function each, with what it falls back to when the name
has gone, and a test of both.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from lightning_dp.internals.collectives import group_set_aside
from lightning_dp.internals.lightning import (
    CheckpointIO,
    SingleDeviceStrategy,
    TorchCheckpointIO,
    call,
    distributed,
    exceptions,
    launchers,
    pl,
    wrapper,
)
from lightning_dp.internals.patch import all_of, patched

# -- Launchers. Lightning's Ctrl+C and its return values depend on these classes.

ScriptLauncher: Any = getattr(launchers, "_SubprocessScriptLauncher", object)
ProcessLauncher: Any = getattr(launchers, "_MultiProcessingLauncher", object)


def interrupt(trainer: pl.Trainer, error: BaseException) -> None:
    """Do what Lightning does when a trainer is interrupted: ``on_exception``, loggers, tear-down.

    In a process that was forked or spawned for a rank nobody else does. Falls back to nothing.
    """
    hooks, teardown = getattr(call, "_interrupt", None), getattr(trainer, "_teardown", None)
    if hooks is not None and teardown is not None:
        hooks(trainer, error)
        teardown()


def set_num_threads(num_processes: int) -> None:
    """Give each rank its share of cores, unless the user chose. Falls back to nothing."""
    choose = getattr(distributed, "_set_num_threads_if_needed", None)
    if choose is not None:
        choose(num_processes=num_processes)


def process_group_backend(strategy: Any) -> str:
    """The backend that the strategy would choose; falls back to its option, then to the device's."""
    choose = getattr(strategy, "_get_process_group_backend", None)
    if choose is not None:
        return str(choose())
    given = strategy.process_group_backend
    return str(given or ("nccl" if strategy.root_device.type == "cuda" else "gloo"))


def timeout_of(strategy: Any) -> timedelta:
    """The strategy's timeout for collectives; falls back to torch's default."""
    given = getattr(strategy, "_timeout", None)
    return given if isinstance(given, timedelta) else timedelta(minutes=30)


def is_agreed_end(error: BaseException) -> bool:
    """Whether all ranks end this way together: a tuner that has seen enough."""
    kind = getattr(exceptions, "_TunerExitException", None)
    return kind is not None and isinstance(error, kind)


def one_device_is_alone() -> None:
    """Let a Trainer of one device, after a run on several ranks, leave the group of that run out of it.

    The program may be at that place on one rank only, and metrics would wait in the group for all. It holds
    for the rest of the process, and may be called again.
    """
    cls = SingleDeviceStrategy
    if hasattr(cls, "_lean_ddp_alone"):
        return
    setup, teardown = cls.setup_environment, cls.teardown

    @functools.wraps(setup)
    def alone(self: Any) -> None:
        self._lean_ddp_restore = group_set_aside()
        setup(self)

    @functools.wraps(teardown)
    def together(self: Any) -> None:
        teardown(self)
        vars(self).pop("_lean_ddp_restore", lambda: None)()

    cls.setup_environment, cls.teardown = alone, together  # type: ignore[method-assign]
    cls._lean_ddp_alone = True  # type: ignore[attr-defined]


# -- Signals


def replace_signal_handlers(
    trainer: pl.Trainer, handle: Callable[[int], None]
) -> Callable[[], None]:
    """Let ``handle(signum)`` see the signals that Lightning would act on inside of a handler.

    Lightning broadcasts in its SIGTERM handler and saves a checkpoint in the one for SLURM's requeue
    signal. Both wait for ranks that may be anywhere. Falls back to Lightning's own handlers.

    Returns:
        Undoes it.
    """
    connector = getattr(trainer, "_signal_connector", None)
    names = ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
    present = [name for name in names if hasattr(connector, name)]

    def handler(signum: int, _frame: Any) -> None:
        handle(int(signum))

    return all_of(*(patched(connector, name, handler) for name in present))


def forget_handlers(trainer: pl.Trainer, previous: Mapping[int, Any]) -> None:
    """Let Lightning give back ``previous`` handlers where it remembers ours as the original ones.

    It saw ours when training began, and puts back what it saw after ours are gone. Without its memory
    there is nothing to correct.
    """
    remembered = getattr(getattr(trainer, "_signal_connector", None), "_original_handlers", None)
    if isinstance(remembered, dict):
        remembered.update({key: previous[key] for key in remembered if key in previous})


def requeue_on_slurm(trainer: pl.Trainer) -> bool:
    """Save SLURM's checkpoint and requeue the job, as Lightning's handler would; False without one.

    Collective: every rank, at the same step: it saves a checkpoint.
    """
    connector = getattr(trainer, "_signal_connector", None)
    act = getattr(type(connector), "_slurm_sigusr_handler_fn", None)
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    number = getattr(environment, "requeue_signal", None) or signal.SIGTERM
    if act is None or not getattr(environment, "auto_requeue", False):
        return False
    act(connector, number, None)
    return True


# -- Checkpoints


def checkpoint_io(strategy: Any, default: CheckpointIO) -> CheckpointIO:
    """The strategy's plugin for checkpoints; ``default`` where the user gave none, or inside a wrapper.

    Without Lightning's attribute it is ``default``.
    """
    given = getattr(strategy, "_checkpoint_io", None)
    if given is None:
        return default
    wraps = getattr(wrapper, "_WrappingCheckpointIO", None)
    if wraps is not None and isinstance(given, wraps):
        inner = given.checkpoint_io
        if inner is None or type(inner) is TorchCheckpointIO:
            given.checkpoint_io = default
    return given  # type: ignore[no-any-return]


def atomic_links(trainer: pl.Trainer) -> Callable[[], None]:
    """Let ``ModelCheckpoint(save_last="link")`` replace its link in one step; returns what undoes it.

    Lightning removes the link and makes a new one: a process killed in between leaves none, and a run
    resumed from ``"last"`` would begin anew. Without the name Lightning's way stays.
    """
    callbacks = [
        callback
        for callback in getattr(trainer, "checkpoint_callbacks", ())
        if getattr(callback, "save_last", None) == "link" and hasattr(callback, "_link_checkpoint")
    ]
    return all_of(*(patched(each, "_link_checkpoint", _link_checkpoint) for each in callbacks))


def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        fresh = f"{linkpath}.{os.getpid()}"
        os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), fresh)
        os.replace(fresh, linkpath)
    trainer.strategy.barrier("link_checkpoint")
