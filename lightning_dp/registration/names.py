"""The names under which a Trainer finds the strategy. Imports nothing, so that help is printed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_STARTS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {"": None, "_find_unused_parameters_true": True, "_find_unused_parameters_false": False}

# For each name the arguments that it stands for.
NAMES: dict[str, dict[str, Any]] = {
    f"lean_ddp{suffix}{tail}": {"start_method": start_method, "find_unused_parameters": unused}
    for suffix, start_method in _STARTS.items()
    for tail, unused in _UNUSED.items()
} | {
    f"lean_zero1{suffix}": {"start_method": start_method, "zero": 1}
    for suffix, start_method in _STARTS.items()
}


def register(registry: Any, strategy: Callable[..., Any]) -> None:
    """Put all names into a registry of Lightning; a second call changes nothing.

    Args:
        registry: A ``StrategyRegistry``.
        strategy: The class, or what makes one from its arguments.
    """
    for name, arguments in NAMES.items():
        registry.register(
            name,
            strategy,
            description=f"Lean data parallel, ranks start by {arguments['start_method']}",
            override=True,
            **arguments,
        )
