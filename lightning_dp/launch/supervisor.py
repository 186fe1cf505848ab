"""One object between the strategy and everything about starting, failing and stopping."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_dp import hydra_seams, run_seams
from lightning_dp.engine.reducer import Reducer
from lightning_dp.engine.window import AccumulationWindow
from lightning_dp.faults.guard import Guard
from lightning_dp.faults.preemption import Preemption
from lightning_dp.faults.store import with_prefix
from lightning_dp.launch import session as sessions
from lightning_dp.launch import torchrun
from lightning_dp.launch.environment import PARENT_VARIABLE, check_group, compare_members
from lightning_dp.launch.launcher import LeanScriptLauncher, placement
from lightning_dp.launch.meeting import Meeting, describe_this_rank, meet
from lightning_dp.launch.options import FaultOptions
from lightning_dp.launch.processes import LeanProcessLauncher
from lightning_dp.launch.stopping import Stopper
from lightning_dp.launch.stores import reach_store

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

log = logging.getLogger(__name__)

T = TypeVar("T")
_AGREEMENT_TIMEOUT_S = 1800.0


class EngineView(Protocol):
    """What is asked of the engine.

    Attributes:
        window: Its ``stop`` travels with the gradients; ``micro_batches`` is 0 between windows.
        reducer: None outside of training.
    """

    window: AccumulationWindow
    reducer: Reducer | None


class Supervisor:
    """Follows the strategy from the launch to the end of each call of the trainer.

    Args:
        options: Checked options.
        engine: What is asked of the engine.

    Attributes:
        guard: The failure channel.
        preemption: The request to stop; ``local_stop`` is for the control tail.
        only_launches: This process started the ranks of a failed run and is none itself.
    """

    def __init__(self, options: FaultOptions, engine: EngineView) -> None:
        self.options = options
        self._engine = engine
        self.preemption = Preemption()
        self.guard = Guard(
            error_grace_s=options.error_grace_s,
            stall_report_s=options.stall_report_s,
            is_agreed=self._is_agreed,
        )
        self.guard.on_failure.append(torchrun.record)
        self.guard.waits.source = self._engine_waits
        self.guard.where = self._where
        self._trainer: pl.Trainer | None = None
        self._stopper: Stopper | None = None
        self._session: sessions.Session | None = None
        self.only_launches = False

    @staticmethod
    def world_size(strategy: DDPStrategy) -> int:
        """How many ranks the strategy wants."""
        return strategy.num_nodes * strategy.num_processes

    @property
    def failing(self) -> bool:
        """Whether this rank is on its way out with an error; nothing collective can succeed."""
        return self.guard.failing

    # Launch

    def make_launcher(self, strategy: Any, start_method: str) -> Any:
        """The launcher for ``strategy``."""
        if start_method == "popen":
            return LeanScriptLauncher(
                strategy.cluster_environment, strategy.num_processes, strategy.num_nodes, self
            )
        return LeanProcessLauncher(strategy, start_method, self)

    def begin_session(self, key: str) -> sessions.Session:
        """Begin or continue the session of a job."""
        self._session = sessions.begin(key, self.options.error_grace_s)
        return self._session

    @staticmethod
    @rank_zero_only
    def report_warnings(warnings: Iterable[str]) -> None:
        """Log what looks odd, once."""
        for text in warnings:
            log.warning(text)

    def run(
        self, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``function`` under guard.

        Raises:
            RankFailedError: Another rank failed first.

        Collective: every rank calls it; it does not communicate by itself.
        """
        self.preemption = Preemption()
        self._trainer = trainer
        try:
            with self.guard.guarding(), self._stoppable(trainer):
                return function(*args, **kwargs)
        finally:
            if self._session is not None:
                self._session.failed |= self.failing
                self._session.preempted |= self.preemption.agreed

    @contextlib.contextmanager
    def _stoppable(self, trainer: pl.Trainer | None) -> Any:
        if trainer is None:
            yield
            return
        undo_links = run_seams.atomic_links(trainer)
        self._stopper = stopper = Stopper(
            trainer,
            self.preemption,
            self.guard,
            on_preempt=self.options.on_preempt,
            signals=self.options.signals,
            timeout_s=_AGREEMENT_TIMEOUT_S,
            window_is_closed=self._window_is_closed,
            tail_carries_stop=self._tail_carries_stop,
        )
        if self.options.on_preempt != "ignore":
            stopper.install()
        try:
            yield
        except BaseException as error:
            if stopper.is_agreed(error):
                stopper.conclude(error)
            raise
        finally:
            stopper.remove()
            undo_links()
            self._stopper = None

    def _is_agreed(self, error: BaseException) -> bool:
        agreed = self.preemption.agreed and isinstance(error, SystemExit)
        return agreed or run_seams.is_agreed_end(error)

    # The strategy's hooks

    def setup_distributed(self, strategy: DDPStrategy, default: Callable[[], None]) -> None:
        """Meet the other ranks, make the process group, begin to watch.

        Args:
            strategy: Whose ranks.
            default: What the strategy would do; finds a process group that exists already.

        Raises:
            LaunchError: Ranks are missing, or run another job.

        Collective: every rank. Blocks until all are there, for ``rendezvous_timeout_s`` at most.
        """
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        assert environment is not None
        rank, world_size = strategy.global_rank, strategy.world_size
        if dist.is_initialized():
            place = placement(environment, strategy.num_processes, strategy.num_nodes)
            check_group(place, dist.get_world_size())
        if world_size == 1:
            default()
            return
        session = self._session or self.begin_session("program")
        session.rank, session.world_size = rank, world_size
        if session.store is None:
            address = (environment.main_address, environment.main_port)
            reach_store(session, rank, address, self.options.rendezvous_timeout_s)
        assert session.store is not None
        job = hydra_seams.hydra_job()
        meeting = meet(
            session.store,
            rank,
            world_size,
            {**describe_this_rank(), "job": job.describe() if job is not None else None},
            timeout_s=self.options.rendezvous_timeout_s,
            check=session.check_peers,
        )
        session.first_process = meeting.processes[0]
        compare_members(meeting.members, rank)
        self.guard.sockets.spared_port = session.port
        if not dist.is_initialized():
            self._make_group(strategy, meeting)
        self._watch(session, meeting)
        default()

    def _make_group(self, strategy: DDPStrategy, meeting: Meeting) -> None:
        device: torch.device = strategy.root_device
        backend = run_seams.process_group_backend(strategy)
        with self.guard.sockets.recording():
            dist.init_process_group(
                backend,
                store=with_prefix("group", meeting.store),  # type: ignore[arg-type]
                rank=meeting.rank,
                world_size=meeting.world_size,
                timeout=run_seams.timeout_of(strategy),
                device_id=device if device.type != "cpu" else None,
            )

    def _watch(self, session: sessions.Session, meeting: Meeting) -> None:
        parent = os.environ.get(PARENT_VARIABLE)
        own = with_prefix("guard", meeting.store)
        self.guard.open(
            own,
            meeting.rank,
            meeting.processes,
            thread_store=with_prefix("guard", meeting.store.clone()),
            children=session.children.ended if session.children.processes else None,
            store_host=-1 if session.outlives_ranks else 0,
            parent_pid=int(parent) if parent else None,
        )
        assert self.guard.watch is not None
        self.guard.watch.hooks.append(self.preemption.share)

    def while_waiting(self, what: str, call: Callable[[], T], alone: T) -> T:
        """Communicate through ``call``; where this rank is failing, do not, and return ``alone``.

        Collective: as ``call``'s.
        """
        if self.guard.failing:
            return alone
        with self.guard.waits.waiting(what):
            return call()

    def barrier(self, name: str, plain: Callable[[], None]) -> None:
        """See :meth:`Guard.barrier`. Collective: every rank, unless this one is failing. Blocks."""
        self.guard.barrier(name, plain)

    def batch_starts(self, batch_idx: int) -> None:
        """A micro-batch of training begins: a request to stop travels with its gradients."""
        self._engine.window.stop = self.preemption.local_stop
        reducer = self._engine.reducer
        if batch_idx == 0 and reducer is not None:
            reducer.on_stop = self._stop_has_travelled

    def _stop_has_travelled(self) -> None:
        """All ranks have read at the same step that one of them was asked to stop."""
        if self._trainer is not None:
            self.preemption.agreed_stop(self._trainer.global_step)

    def _window_is_closed(self) -> bool:
        return self._engine.window.micro_batches == 0

    def _tail_carries_stop(self) -> bool:
        reducer = self._engine.reducer
        module = self._trainer.lightning_module if self._trainer is not None else None
        automatic = module is not None and module.automatic_optimization
        return automatic and reducer is not None and reducer.group.world_size > 1

    def _engine_waits(self) -> tuple[str, tuple[str, ...]] | None:
        """Called by the watching thread: what the engine waits for."""
        reducer = self._engine.reducer
        bucket = reducer.waiting_for if reducer is not None else None
        if bucket is None or reducer is None:
            return None
        names = tuple(bucket.names)
        return f"the gradients of step {self._step()}, bucket {bucket.index}", names

    def _where(self) -> str:
        """What this rank is doing, for reports."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn is None:
            return ""
        stage = trainer.state.stage
        return f"{trainer.state.fn.value}, {stage.value if stage else 'start'}, step {self._step()}"

    def _step(self) -> int:
        return self._trainer.global_step if self._trainer is not None else -1

    def evaluation_starts(self) -> None:
        """A validation, test or prediction begins. Collective: none."""
        if self._stopper is not None:
            self._stopper.evaluation_starts()

    def evaluation_ends(self) -> None:
        """A validation, test or prediction ends. Collective: every rank. Blocks."""
        if self._stopper is not None:
            self._stopper.evaluation_ends()

    def __getstate__(self) -> dict[str, Any]:
        """A spawned rank begins a session of its own."""
        return {**self.__dict__, "_session": None, "_stopper": None, "_trainer": None}
