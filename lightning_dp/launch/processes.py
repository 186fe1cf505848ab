"""Start the ranks as forked or spawned processes that run one call of the trainer."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import ConfigError, LaunchError, RankFailedError
from lightning_dp.faults.liveness import die_with_parent
from lightning_dp.faults.peers import exit_error
from lightning_dp.faults.record import FailureRecord, is_consequence
from lightning_dp.faults.store import Store
from lightning_dp.internals import binding
from lightning_dp.internals import hydra as hydra_seams
from lightning_dp.internals import runs as run_seams
from lightning_dp.internals.lightning import SIGTERMException, pl
from lightning_dp.internals.patch import patched
from lightning_dp.launch import exit_code
from lightning_dp.launch.environment import PARENT_VARIABLE, PID_VARIABLE, remember_variables
from lightning_dp.launch.guarded_call import GuardedCall
from lightning_dp.launch.stores import STORE_VARIABLE, host_store, reach_store

FIRST_ERROR = "first error"
_NOTHING_COMES_BACK = (
    "Tuner.lr_find ends inside of forked or spawned ranks, and what it found does not come back to the"
    " program. Fix: put LearningRateFinder() among the callbacks of fit, or use strategy='lean_ddp'."
)
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class LeanProcessLauncher(run_seams.ProcessLauncher):  # type: ignore[misc]
    """Runs the trainer's call in new processes, one for each rank of this machine.

    The calling process is no rank: it hosts the store, waits, and takes over rank 0's results.

    Args:
        strategy: Whose ranks.
        start_method: "fork", "spawn" or "forkserver".
        call: Guards the call in each rank.
    """

    def __init__(self, strategy: Any, start_method: str, call: GuardedCall) -> None:
        try:
            super().__init__(strategy, start_method=start_method)
        except ValueError as error:
            raise ConfigError(
                f"[lean_ddp] start_method={start_method!r} does not exist on this system. Fix: "
                "strategy='lean_ddp', which runs the script again."
            ) from error
        self._call = call
        self._forwarded: set[int] = set()  # signals of this launch

    @property
    def procs(self) -> list[Any]:
        """The ranks' processes. Lightning sets it when all are started: they get what came meanwhile.

        It stays in ``__dict__`` under this name, where Lightning leaves it out of what is pickled.
        """
        found: list[Any] = self.__dict__["procs"]
        return found

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self.__dict__["procs"] = processes
        for number in getattr(self, "_forwarded", ()):
            self.kill(number)

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start all ranks, wait for them, return rank 0's result.

        Raises:
            RankFailedError: A rank failed; the first one is named.

        Collective: none; the calling process is no rank.
        """
        exit_code.arm()
        self._forwarded.clear()
        # A call that failed before leaves a cycle that holds its store. A forked rank that collected it
        # would wait for ever for the store's thread, which it does not have.
        gc.collect()
        hydra_seams.pin_drawn_values()
        grace_s = self._call.options.error_grace_s
        # The store outlives the ranks.
        with self._environment() as stores, _ending_processes(grace_s), self._forwarding():
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except (ProcessRaisedException, ProcessExitedException) as error:
                self._call.guard.failing = True  # nothing here is a rank's state
                self._call.only_launches = True
                explained = self._explain(stores[0], error)
        raise explained  # it has the rank's traceback

    @contextlib.contextmanager
    def _environment(self) -> Iterator[list[Store]]:
        """The store's address for the ranks, and it alone in a list; everything as before afterwards.

        An exception keeps the frames that it passed, and with them the store. A rank of a later call, a
        fork that inherits it, would wait forever for the store's thread when it collects garbage. So the
        list is emptied.
        """
        put_back = remember_variables(STORE_VARIABLE, binding.VARIABLE)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        hosted = host_store()
        stores, port = [hosted.store], hosted.port
        del hosted
        os.environ[STORE_VARIABLE] = f"127.0.0.1:{port}"
        os.environ["MASTER_PORT"] = str(port)
        # A spawned rank imports in another order.
        os.environ[binding.VARIABLE] = binding.bound().package
        try:
            yield stores
        finally:
            stores.clear()
            put_back()

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """A request to stop that reaches this process is meant for the ranks."""
        signals = self._call.signals
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        launching = os.getpid()

        def forward(number: int, _: object) -> None:
            if os.getpid() != launching:  # a forked rank without a handler of its own: it just ends
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._forwarded.add(number)
            self.kill(number)

        before = {number: signal.signal(number, forward) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _explain(self, store: Store, error: Any) -> BaseException:
        """The failure that was first, rather than that of the process that ended first."""
        ended_with = getattr(error, "exit_code", 1)
        if ended_with == exit_code.PREEMPTED:
            return SIGTERMException(exit_code.PREEMPTED)
        record = None
        if store.check([FIRST_ERROR]):
            record = FailureRecord.from_json(store.get(FIRST_ERROR))
        if record is not None and (record.traceback or record.rank < 0):
            return record.to_error(None, self._strategy.num_nodes * self._strategy.num_processes)
        if record is None and isinstance(error, ProcessRaisedException):
            return RankFailedError(str(error), rank=error.error_index, remote_traceback=str(error))
        rank = record.rank if record is not None else error.error_index
        code = self.procs[rank].exitcode  # better than what another rank saw of its end
        if code is not None and -code in self._forwarded:  # asked to stop before it had a handler
            return SIGTERMException(exit_code.PREEMPTED)
        return exit_error(rank, -signal.SIGKILL if code is None else code, "first")

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *rest: Any,
    ) -> None:
        """Runs in the new process."""
        die_with_parent(os.getppid())
        os.environ[PARENT_VARIABLE] = str(os.getppid())
        os.environ[PID_VARIABLE] = str(os.getpid())

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._run(process_idx, trainer, function, *args, **kwargs)

        super()._wrapping_function(process_idx, trainer, guarded, args, kwargs, *rest)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        """Take over what rank 0 left. Its file of weights is our own: tensors of any class may be in it."""
        io = self._strategy.checkpoint_io
        undo = patched(
            io,
            "load_checkpoint",
            partial(io.load_checkpoint, map_location="cpu", weights_only=False),
        )
        try:
            super()._recover_results_in_main_process(worker_output, trainer)
        finally:
            undo()

    def _run(
        self,
        rank: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        job = self._call.begin_job("program")
        try:
            return self._call.run(trainer, function, *args, **kwargs)
        except BaseException as error:
            first = self._call.guard.first or self._untold(rank, error)
            if first is not None:
                with contextlib.suppress(RuntimeError):
                    hosted = job.hosted or reach_store(
                        rank, ("", 0), self._call.options.error_grace_s
                    )
                    hosted.store.compare_set(FIRST_ERROR, "", first.to_json())
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does: it is ending
            if trainer is not None:
                run_seams.interrupt(trainer, error)
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(1) from None  # torch would end the process with code 0
            raise

    def _untold(self, rank: int, error: BaseException) -> FailureRecord | None:
        """The failure of a rank that had nobody to tell: ranks have not met yet, or there is one."""
        if run_seams.is_agreed_end(error):
            error = LaunchError(_NOTHING_COMES_BACK)
        elif not isinstance(error, Exception) or is_consequence(error):
            return None
        return FailureRecord.from_exception(rank, error, self._call.where())


@contextlib.contextmanager
def _ending_processes(grace_s: float) -> Iterator[None]:
    """Leave no process behind when the launching one is interrupted (Ctrl+C, a notebook's stop button).

    A terminal sends SIGINT to all of them, a notebook and ``kill`` to one. So those that do not end by
    themselves are interrupted, and those that then do not stop are ended.

    Args:
        grace_s: Seconds between two steps.
    """
    others = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        ranks = [process for process in multiprocessing.active_children() if process not in others]
        for number, wait_s in ((None, 1.0), (signal.SIGINT, 2 * grace_s), (_KILL, grace_s)):
            for process in ranks:
                if number is not None and process.pid is not None and process.is_alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            poll_until(lambda: not any(process.is_alive() for process in ranks), wait_s)
        raise
