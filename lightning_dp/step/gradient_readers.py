"""Who may read gradients: a user's methods, and functions of his that these call.

Code is read, not run: a name ``grad`` in it counts. Packages that were installed are left out, unless the
method is in the same one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

# Where users read gradients, or change them.
READING_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
)
_NOT_A_USERS = ("lightning.", "pytorch_lightning.", "lightning_dp.")
_NEVER = (*_NOT_A_USERS, "torch.", "builtins.", "importlib.")


def is_own(owner: object, hook: str) -> bool:
    """Whether ``owner`` has a ``hook`` that a user wrote."""
    module = getattr(getattr(owner, hook, None), "__module__", None) or "lightning."
    return not module.startswith(_NOT_A_USERS)


def readers(owners: Sequence[object]) -> list[str]:
    """Methods of ``owners`` that may read gradients, each as a sentence."""
    return [
        f"{type(each).__name__}.{name} may read them (zero={{'gradients': 'own'}} if it does not)"
        for each in owners
        for name in (*(hook for hook in READING_HOOKS if is_own(each, hook)), *_name_grad(each))
    ]


def _name_grad(owner: object) -> list[str]:
    """Methods that a user wrote, of whatever name, whose code or functions say ``grad``."""
    functions = {
        name: inspect.unwrap(
            value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        )
        for cls in type(owner).__mro__
        for name, value in vars(cls).items()
        if not f"{cls.__module__}.".startswith(_NEVER)
    }
    return [name for name, each in functions.items() if _reads(each, set())]


def _reads(function: Any, seen: set[int]) -> bool:
    """Whether ``function``, or one that it calls by a global name, says ``grad``."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    names = set(_names(function.__code__))
    if "grad" in names:
        return True
    return any(_reads(each, seen) for each in _called(function, names))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _called(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Functions that ``function`` can reach by ``names``: its module's, and those of modules it knows."""
    reachable = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for value in reachable.values():
        found = (
            [getattr(value, name, None) for name in names]
            if isinstance(value, ModuleType) and _is_near(value.__name__, function)
            else [value]
        )
        for each in found:
            if isinstance(each, FunctionType) and _is_near(each.__module__ or "", function):
                yield inspect.unwrap(each)


def _is_near(module: str, function: FunctionType) -> bool:
    """Whether ``module`` is a user's, or in the package of ``function``."""
    package = module.partition(".")[0]
    if f"{module}.".startswith(_NEVER) or package in sys.stdlib_module_names:
        return False
    if package == (function.__module__ or "").partition(".")[0]:
        return True
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return not any(part in path for part in ("site-packages", "dist-packages"))
