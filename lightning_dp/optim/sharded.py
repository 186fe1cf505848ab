"""One optimizer whose state is in shares: what happens around each of its steps.

[Note: inside the step] A Trainer runs forward, backward, unscaling and clipping in the closure that
``step`` gets. So the optimizer is shown this rank's parts after the closure has returned, and everything
is put back, and gathered, before anybody else sees the step's result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires.codec import HALF
from lightning_dp.errors import ConfigError, ReplicaMismatchError, some_names
from lightning_dp.internals.optimizers import run_first_after_step
from lightning_dp.internals.patch import patched
from lightning_dp.optim import state as states
from lightning_dp.optim.exchange import MASTER, Exchange
from lightning_dp.optim.gather import ParameterGather
from lightning_dp.optim.shares import Shares
from lightning_dp.optim.stored import Entry

# What optimizers that were hooked once have: a second fit may be given the same object.
_IN_SHARES: WeakKeyDictionary[Optimizer, Shares] = WeakKeyDictionary()


def make_whole(optimizer: Optimizer, group: ReplicaGroup) -> None:
    """Give every rank the whole state of an optimizer that an earlier fit left in shares.

    Raises:
        ConfigError: The other ranks' shares are not here.

    Collective: every rank, where there was such a fit. Blocks.
    """
    shares = _IN_SHARES.pop(optimizer, None)
    if shares is None:
        return
    if (shares.rank, shares.world_size) != (group.rank, group.world_size):
        raise ConfigError(
            f"the state of this {type(optimizer).__name__} is in shares of {shares.world_size} ranks since"
            f" an earlier fit, and this one has {group.world_size}. Make the optimizer anew in"
            " configure_optimizers, and resume from a checkpoint."
        )
    states.make_whole(optimizer, shares, group)


def forget_masters(optimizer: Optimizer) -> None:
    """Drop what an earlier fit kept in fp32 of parameters of half precision. Local."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            state.pop(MASTER, None)


class ShardedOptimizer:
    """Hooks on a user's optimizer, which stays the object that it is.

    Args:
        optimizer: Whose state is kept in shares.
        index: Its number, for messages.
        shares: Who updates what.
        gather: Brings what each rank has updated to all.
        group: Who takes part.
        masters: Whether parameters of half precision are updated in fp32.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        shares: Shares,
        gather: ParameterGather,
        group: ReplicaGroup,
        *,
        masters: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._what = f"optimizer {index} ({type(optimizer).__name__})"
        self._shares = shares
        self._group = group
        self._masters = masters
        self._exchange = Exchange(shares, masters=masters)
        self._gather = gather
        self._is_cut = False  # nothing in its state is whole that should be a part
        self._is_loaded = False  # it is as it was in a file
        self._given: dict[Any, Any] = {}  # what is being loaded
        self._compared = False
        _IN_SHARES[optimizer] = shares
        self._undo = [self._wrap_switch(name) for name in ("train", "eval")]
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            run_first_after_step(optimizer, self._after),
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def close(self) -> None:
        """Remove the hooks; the state stays in shares. Local; in the reverse order of their making."""
        self.put_back()
        if self._is_loaded:  # and no step was made
            with contextlib.suppress(OSError):
                self._cut()
        for undo in self._undo:
            undo()
        for handle in self._handles:
            handle.remove()

    def put_back(self) -> None:
        """After a step that raised: give parameters and gradients back. Local, idempotent."""
        self._exchange.leave()

    def state_dict(self, group: ReplicaGroup) -> dict[str, Any]:
        """The whole state on rank 0 of ``group``, nothing elsewhere. Collective: every rank. Blocks."""
        self._cut()
        return states.whole_state_dict(self.optimizer, self._shares, group)

    def settings(self) -> dict[str, Any]:
        """The state dict without what is kept for parameters. Local."""
        whole = self.optimizer.state_dict()
        others = {k: v for k, v in self.optimizer.state.items() if not isinstance(k, Tensor)}
        return {**whole, "state": others}

    def entries(self, label: str) -> Iterator[Entry]:
        """What this rank keeps for each parameter, to be written. Local."""
        self._cut()
        return states.entries(label, self.optimizer, self._shares)

    @property
    def loads_in_parts(self) -> bool:
        """Whether :meth:`put` does what its class does when it loads a state."""
        return type(self.optimizer).load_state_dict is Optimizer.load_state_dict

    def put(self, state: dict[Any, dict[str, Any]]) -> None:
        """Take over a loaded state, by number of the parameter; a rank's parts are cut when it steps.

        Local; every rank calls it, after the groups were loaded.
        """
        states.put(self.optimizer, state)
        self._is_cut, self._is_loaded = False, True

    # Around a step ([Note: inside the step])

    def _before(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        self.put_back()  # what a step left that raised
        place = next((n for n, value in enumerate(args) if n and callable(value)), None)
        closure = args[place] if place is not None else kwargs.get("closure")
        if closure is None:
            self._enter()
            return None
        closed = self._once(closure)
        if place is None:
            return args, {**kwargs, "closure": closed}
        return (*args[:place], closed, *args[place + 1 :]), kwargs

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def closed() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                self.put_back()
                raise ConfigError(
                    f"[rank {self._group.rank}] {self._what} called its closure twice in one step, between"
                    " which it has changed this rank's share of the parameters only. Keep its state whole:"
                    f" zero={{'except_': [{type(self.optimizer).__name__!r}]}}."
                )
            output = closure()
            self._enter()
            return output

        return closed

    def _enter(self) -> None:
        self._gather.finish()
        self._cut()
        self._exchange.enter(self.optimizer)

    def _cut(self) -> None:
        """Keep this rank's parts of what is whole; all of it as long as nobody knows the shares."""
        if self._shares.follow_layout():
            self._is_cut = False
        if not self._is_cut:
            wide = HALF if self._masters else ()
            states.cut(self.optimizer, self._shares, loaded=self._is_loaded, wide=wide)
            self._is_cut, self._is_loaded = True, False

    def _after(self, *_: Any) -> None:
        """Put back and gather. Collective: every rank. Blocks."""
        touched = self._exchange.leave()
        self._gather.run(touched)
        if touched and not self._compared:
            self._compared = True
            self._compare()

    def _wrap_switch(self, name: str) -> Callable[[], None]:
        """Show a schedule-free optimizer this rank's parts in ``train`` and ``eval``, which move them.

        Its class is asked, since a Trainer's wrapper of the optimizer is of that class too.
        """
        cls = type(self.optimizer)
        original = getattr(cls, name, None)
        if original is None:
            return lambda: None

        def switch(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(optimizer, "optimizer", optimizer) is not self.optimizer:
                return original(optimizer, *args, **kwargs)
            self._gather.finish()
            self._cut()
            self._exchange.enter(self.optimizer, all_of_them=True)
            try:
                return original(self.optimizer, *args, **kwargs)
            finally:
                self._gather.run(self._exchange.leave())

        return patched(cls, name, switch)

    def _remember(self, _: Optimizer, state: dict[str, Any]) -> None:
        self._given = state.get("state", {}) if self._masters else {}

    def _loaded(self, _: Optimizer) -> None:
        self._is_cut = self._is_loaded = False
        given, self._given = self._given, {}
        if given:  # which was rounded to the parameters' type
            self.put(given)

    def _compare(self) -> None:
        """After the first step: what is kept for the optimizer as a whole must be equal on all ranks.

        Raises:
            ReplicaMismatchError: It works something out from all parameters that a rank updates.

        Collective: every rank, once. Blocks.
        """
        mine = {
            f"{key} of group {number}": repr(value)
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if not key.startswith("param") and _is_scalar(value)
        }
        everyone = self._group.all_gather_object(mine)
        differ = [key for key in mine if any(other.get(key) != mine[key] for other in everyone)]
        if differ:
            raise ReplicaMismatchError(
                f"[rank {self._group.rank}] {some_names(differ)} of {self._what} differ between ranks after"
                " a step in which each updated its share: it works them out from all of its parameters."
                f" Keep its state whole: zero={{'except_': [{type(self.optimizer).__name__!r}]}}.",
                names=differ,
                ranks=(),
            )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, tuple)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )
