"""``zero=1`` in a Trainer's life: whose state is in shares, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_dp.engine.bucket import UNCUT, Bucket, Slicing, Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.reducer import Reducer
from lightning_dp.engine.wires.codec import HALF
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.errors import ConfigError
from lightning_dp.faults.checkpoint_io import AtomicCheckpointIO
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import CheckpointIO, pl
from lightning_dp.optim.forward import ForwardGather
from lightning_dp.optim.gather import ParameterGather
from lightning_dp.optim.kinds import Sharding, Verdict, judge, of_parameter
from lightning_dp.optim.readers import GradientReaders
from lightning_dp.optim.sharded import ShardedOptimizer, forget_masters, make_whole
from lightning_dp.optim.shares import Shares
from lightning_dp.optim.state import parameters_of, state_bytes, without_masters
from lightning_dp.options import EngineOptions
from lightning_dp.step.gradient_readers import is_own, readers
from lightning_dp.step.optimizer_groups import OptimizerGroups
from lightning_dp.step.zero_parts import has_masters, set_masters_apart, without_parts, write_parts

log = logging.getLogger(__name__)


class ZeroState:
    """The optimizers whose state is in shares; none where the option is 0.

    Args:
        options: Checked options.

    Attributes:
        own_gradients: Whether a rank gets the means of its own slices only.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._option = options.zero
        self._accumulates = options.accum_sync == "every"
        keys: Mapping[str, Any] = self._option if isinstance(self._option, Mapping) else {}
        split = keys.get("split", "auto")
        self._gradients = keys.get("gradients", "auto")
        self._gather_in = keys.get("gather", "step")
        self._gather: ParameterGather | None = None
        self._slices = split != "off"
        self._known = () if isinstance(split, str) else tuple(split)
        self._masters = bool(keys.get("masters"))
        self._in_parts = keys.get("format") == "sharded"
        self._except: tuple[str, ...] = tuple(keys.get("except_", ()))
        self._verdicts: list[Verdict] = []
        self._groups = OptimizerGroups(())
        self._sharded: dict[int, ShardedOptimizer] = {}  # by number of the optimizer
        self._group: ReplicaGroup | None = None
        self._trainer: pl.Trainer | None = None
        self._is_open = False
        self.own_gradients = False
        self._readers: GradientReaders | None = None

    def decide(self, groups: OptimizerGroups, group: ReplicaGroup, trainer: pl.Trainer) -> None:
        """Work out, on rank 0 for all, how the work of each optimizer is divided.

        Raises:
            ConfigError: Ranks ask for different things, or for what the module does not allow.

        Collective: every rank. Blocks.
        """
        optimizers = groups.optimizers
        self._groups, self._verdicts, self._sharded = groups, [], {}
        self._group, self._is_open, self._trainer = group, True, trainer
        self.own_gradients = False
        group.refuse_difference("zero", self._option)
        for each in optimizers:
            make_whole(each, group)
            if not self._masters and isinstance(each, Optimizer):
                forget_masters(each)
        if not self._option:
            return
        if group.world_size == 1 and not self._masters:
            log.info("lean_ddp: zero: one rank has nothing to share; its state stays whole.")
            return
        mine = [self._judge(each) for each in optimizers] if group.rank == 0 else None
        self._verdicts = group.broadcast_object(mine)
        if group.rank == 0:
            for number, (each, verdict) in enumerate(zip(optimizers, self._verdicts, strict=True)):
                self._say(f"optimizer {number} ({type(each).__name__})", verdict)
        slices = any(verdict.sharding is Sharding.SLICES for verdict in self._verdicts)
        if slices and group.world_size > 1:
            self.own_gradients = self._own_gradients(trainer, group)

    def _own_gradients(self, trainer: pl.Trainer, group: ReplicaGroup) -> bool:
        """Whether a rank can do with the means of its own slices. Collective: every rank."""
        if self._gradients == "all":
            return False
        module = trainer.lightning_module
        reasons = self._obstacles(module)
        if reasons and self._gradients == "own":
            raise ConfigError(
                f"zero={{'gradients': 'own'}} is not possible for {type(module).__name__}:"
                f" {reasons[0]}, and"
                " a rank's gradients would be zero outside of its slices. Use 'auto' or 'all'."
            )
        if self._gradients == "auto":
            reasons += readers((module, *getattr(trainer, "callbacks", ())))
        first = next((found[0] for found in group.all_gather_object(reasons) if found), None)
        if first is not None and group.rank == 0:
            log.info(
                "lean_ddp: zero: every rank gets all gradients, which sends half as many bytes more: %s.",
                first,
            )
        return first is None

    def _obstacles(self, module: pl.LightningModule) -> list[str]:
        """What does not work with a part of the gradients."""
        found = {
            "manual optimization may add to averaged gradients": not module.automatic_optimization,
            "accum_sync='every' adds to averaged gradients": self._accumulates,
            "its optimizer_zero_grad may leave averaged gradients": is_own(
                module, "optimizer_zero_grad"
            ),
            "this version of torch has other names": not GradientReaders.are_known(),
        }
        return [reason for reason, holds in found.items() if holds]

    def _judge(self, optimizer: Optimizer) -> Verdict:
        if not isinstance(optimizer, Optimizer):
            return Verdict(Sharding.REPLICATED, "it is not a torch.optim.Optimizer")
        name = type(optimizer).__name__
        if any(fnmatch(name, pattern) for pattern in self._except):
            return Verdict(Sharding.REPLICATED, "except_ names it")
        masters = self._masters and any(p.dtype in HALF for p in parameters_of(optimizer))
        if self._masters and not masters:
            log.warning(
                "lean_ddp: zero: no parameter of %s is of half precision: it needs no masters.",
                name,
            )
        return judge(optimizer, self._known, slices=self._slices, masters=masters)

    def _say(self, what: str, verdict: Verdict) -> None:
        if verdict.sharding is Sharding.REPLICATED:
            log.warning(
                "lean_ddp: zero: the state of %s stays whole on every rank%s: %s.",
                what,
                ", without masters" if self._masters else "",
                verdict.reason,
            )
        else:
            log.info("lean_ddp: zero: the state of %s is in %s.", what, verdict.sharding.value)

    def sharding(self, name: str, parameter: nn.Parameter) -> Sharding:
        """How the work on one parameter is divided."""
        numbers = self._groups.all_of(parameter)
        if len(numbers) != 1 or not self._verdicts:
            return (
                Sharding.REPLICATED
            )  # of two optimizers, each would see the other's part as stale
        if any(fnmatch(name, pattern) for pattern in self._except):
            return Sharding.REPLICATED
        return of_parameter(self._verdicts[numbers[0]].sharding, parameter)

    def sliced(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the parameter's optimizer updates slices of buckets."""
        return self.sharding(name, parameter) is Sharding.SLICES

    def slicing(self, group: ReplicaGroup) -> Slicing:
        """How buckets are cut."""
        divides = any(verdict.sharding is not Sharding.REPLICATED for verdict in self._verdicts)
        return Slicing(group.world_size) if divides else UNCUT

    def attach(self, reducer: Reducer, timeout: timedelta | None) -> None:
        """Hook the optimizers whose work is divided.

        Args:
            reducer: Whose parameters.
            timeout: How long a collective may take; ``None`` is torch's default.

        Collective: every rank. Blocks.
        """
        group = reducer.group

        def sharding_of(slot: Slot) -> Sharding:
            sharding = self.sharding(slot.name, slot.param)
            # One that got its optimizer after its bucket is in no bucket that is cut.
            late = sharding is Sharding.SLICES and not slot.sliced
            return Sharding.TENSORS if late else sharding

        if self.own_gradients and not reducer.wire.gathers:
            self._readers = GradientReaders(lambda: reducer.registry.slots, group)
        ranks = group.rank, group.world_size
        shares = Shares(reducer.layout, *ranks, sharding_of, lambda: reducer.registry.slots)
        self._gather = gather = self._make_gather(shares, reducer, timeout)
        self._sharded = {
            number: ShardedOptimizer(each, number, shares, gather, group, masters=self._masters)
            for number, (each, verdict) in enumerate(
                zip(self._groups.optimizers, self._verdicts, strict=False)
            )
            if verdict.sharding is not Sharding.REPLICATED
        }

    def _make_gather(
        self, shares: Shares, reducer: Reducer, timeout: timedelta | None
    ) -> ParameterGather:
        """How updated parameters come to all ranks. Collective: every rank."""
        wire, group, forward = reducer.wire, reducer.group, self._gather_in == "forward"
        if isinstance(wire, SharedMemoryWire):
            if forward and group.rank == 0:
                log.info(
                    "lean_ddp: zero: gather='forward' hides nothing where ranks share memory, which the"
                    " host itself copies: parameters come back when the step ends."
                )
            return ParameterGather(shares, group, wire.memory)
        divides = any(each.sharding is not Sharding.REPLICATED for each in self._verdicts)
        if forward and divides and group.world_size > 1:
            return ForwardGather.connect(shares, group, timeout)
        return ParameterGather(shares, group)

    def finish(self) -> None:
        """Wait for parameters that are still on their way. Local."""
        if self._gather is not None:
            self._gather.finish()

    def give_up(self) -> None:
        """Training ends with an error: wait for parameters no more. Local."""
        if self._gather is not None:
            self._gather.give_up()

    @property
    def waiting_for(self) -> Bucket | None:
        """The bucket whose updated parameters the host waits for, for a stall report."""
        gather = self._gather
        return gather.waiting_for if isinstance(gather, ForwardGather) else None

    def put_back(self) -> None:
        """After a step that raised, give parameters and gradients back. Local, idempotent."""
        for each in self._sharded.values():
            each.put_back()

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """The optimizer's whole state on rank 0, nothing elsewhere; ``None`` if it is whole everywhere.

        Collective: every rank. Blocks.
        """
        number = self._groups.index(optimizer)
        sharded = self._sharded.get(number) if number is not None else None
        if sharded is None:
            return None
        if self._is_incomplete:
            return {}  # other ranks, which have the rest, may never come
        if self._in_parts:
            return sharded.settings()
        with self._together() as group:
            return sharded.state_dict(group)

    @property
    def _is_incomplete(self) -> bool:
        """Whether other ranks, which may never come, have some of the state."""
        shared = self._sharded and self._group is not None and self._group.world_size > 1
        return bool(shared) and trainer_seams.is_unwinding(self._trainer)

    @contextmanager
    def _together(self) -> Generator[ReplicaGroup]:
        """The ranks' group, also when training has ended; shares are still shares."""
        assert self._group is not None
        group = self._group if self._is_open else ReplicaGroup.create(self._group.device)
        try:
            yield group
        finally:
            if not self._is_open:
                group.close()

    def check_io(self, io: CheckpointIO) -> None:
        """Refuse what writes checkpoints in another way than parts need.

        Raises:
            ConfigError: Names it.
        """
        if self._in_parts and type(io) is not AtomicCheckpointIO:
            raise ConfigError(
                f"zero={{'format': 'sharded'}} writes checkpoints by itself, and a {type(io).__name__} was"
                " given. Drop one of them."
            )

    def add_to(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Put masters where other strategies do not see them; with ``format: sharded`` write parts.

        Collective: every rank. Blocks.
        """
        if not self._sharded or "optimizer_states" not in checkpoint:
            return
        if self._in_parts:
            with self._together() as group:
                write_parts(checkpoint, path, self._sharded, group)
        elif self._masters:
            set_masters_apart(checkpoint)

    def load(
        self, states: list[dict[str, Any]], load: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        """Load states that are whole; of those in shares each rank takes its parts when it knows them.

        Args:
            states: By number of the optimizer; tensors may be on disk still.
            load: Loads what it is given, as without shares.

        Local; every rank calls it.
        """
        if not self._masters and has_masters(states):
            if self._group is not None and self._group.rank == 0:
                log.warning(
                    "lean_ddp: zero: the checkpoint's masters in fp32 are not used: parameters go on as"
                    " they were rounded. zero={'masters': True} uses them."
                )
            states = [{**each, "state": without_masters(each["state"])} for each in states]
        later = {number: each for number, each in self._sharded.items() if each.loads_in_parts}
        load(without_parts(states, later))
        for number, each in later.items():
            if number < len(states):
                each.put(states[number]["state"])

    def forbids_saving(self, checkpoint: Mapping[str, Any], path: object) -> bool:
        """Whether ``checkpoint`` lacks what ranks have that may never come; then says so. Local."""
        if not self._is_incomplete or "optimizer_states" not in checkpoint:
            return False
        log.error(
            "lean_ddp: zero: %s was not written: a run that ends with an error cannot bring the shares of"
            " the optimizer's state together. The last checkpoint from before holds.",
            path,
        )
        return True

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        optimizers = self._groups.optimizers
        return sum(state_bytes(each) for each in optimizers if isinstance(each, Optimizer))

    def close(self) -> None:
        """Remove the hooks; states stay in shares. Local."""
        if self._readers is not None:
            self._readers.close()
            self._readers = None
        self._is_open = False
        for each in reversed(self._sharded.values()):
            each.close()
        if self._gather is not None:
            self._gather.close()
            self._gather = None
