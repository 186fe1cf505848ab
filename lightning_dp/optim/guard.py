"""Whoever reads a parameter while its new value is on its way waits for it.

[Note: how a read is seen] Meanwhile the parameter is of the class ``Awaited``, and torch asks an argument's
class before it calls one of its functions, in whatever thread, module, container or callback. The first
call that needs the value waits, and gives the parameter its own class back. What does not ask: native
code that holds the parameter or is handed it as it is (``internals/reads.py`` lists what is watched), and
other tensors on the same memory. Where there are such tensors, which their storage counts, nobody waits
later: the value is brought at once. A module's own parameters are brought before it runs, so that its
native code may read them; without autograd, which has other ways through modules, those below it too.

Source: apex's DistributedFusedAdam waits in ``Parameter.__getattribute__``, which native code does not
call; a hook on each module misses ``nn.MultiheadAttention``, which reads its ``out_proj`` without a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.internals.autograd import storage_uses

_arrive: dict[int, Callable[[], None]] = {}  # by id of a parameter: waits for its value

# What can be asked of a parameter while its value is not there.
_NO_VALUE: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype")),
        *(getattr(Tensor, name).__get__ for name in ("device", "is_leaf", "ndim")),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.requires_grad_, Tensor.is_floating_point),
    }
)


class Awaited(nn.Parameter):
    """A parameter whose new value is on its way ([Note: how a read is seen])."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the value that ``func`` needs, and call it."""
        kwargs = kwargs or {}
        if func in _NO_VALUE:
            return nn.Parameter.__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not bring((args, kwargs)):
            bring_all()  # it is in a container of another kind
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """As that of its own class, which a copy must have."""
        bring(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As that of its own class."""
        bring(self)
        return self.__reduce_ex__(protocol)


def can_await(parameter: Tensor) -> bool:
    """Whether a read would be seen: of a class with functions of its own, or shared, it might not be."""
    if type(parameter) is not nn.Parameter:
        return False
    return parameter.device.type != "cpu" or not parameter.untyped_storage().is_shared()


def seen_alone(parameters: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Tell of a parameter whether no tensor but ``parameters`` has memory of its storage; ask at once."""
    known = Counter(each.untyped_storage().data_ptr() for each in parameters)
    return lambda each: storage_uses(each) == known[each.untyped_storage().data_ptr()] + 1


def await_value(parameter: Tensor, arrive: Callable[[], None]) -> None:
    """Let who reads ``parameter`` call ``arrive`` first, which must end with :func:`has_come`. Local."""
    torch.autograd.graph.increment_version(
        parameter
    )  # an older graph must not use it, as after a step
    _arrive[id(parameter)] = arrive
    parameter.__class__ = Awaited


def has_come(parameter: Tensor) -> None:
    """Give ``parameter`` its own class back. Local, idempotent."""
    _arrive.pop(id(parameter), None)
    if type(parameter) is Awaited:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def memory_of(parameter: Tensor) -> Tensor:
    """``parameter`` without autograd, though its value may not be there."""
    detached: Tensor = nn.Parameter.__torch_function__(  # type: ignore[no-untyped-call]
        Tensor.detach, (), (parameter,), {}
    )
    return detached


def bring(value: Any) -> bool:
    """Wait for every parameter in ``value``, also in nested containers; return whether there was one."""
    found = list(_awaited(value))
    for each in found:
        _arrive.get(id(each), lambda: None)()
        has_come(each)
    return bool(found)


def bring_all() -> None:
    """Wait for every parameter of this process that is on its way."""
    for arrive in list(_arrive.values()):
        arrive()


def before_module(module: nn.Module, _: Any) -> None:
    """Bring what ``module`` may hand to native code; as a hook before every forward."""
    below = not torch.is_grad_enabled()
    for each in module.parameters(recurse=below):
        if type(each) is Awaited:
            bring(each)


def _awaited(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Awaited):
        yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for each in value:
            yield from _awaited(each)
    elif isinstance(value, dict):
        yield from _awaited(tuple(value.values()))
