"""Find mistakes in a composed config before any process is started or any module is built.

Hydra catches a misspelt key that the config does not have; it cannot know what a ``_target_`` takes.
A wrong value would otherwise be met deep inside a library, once on every rank.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Union

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_dp.errors import ConfigError

# What a YAML scalar can be. An annotation that allows anything else is left to its owner.
_SCALARS: tuple[type, ...] = (bool, int, float, str, type(None))


def check_arguments(cfg: DictConfig) -> None:
    """Compare every node that has a ``_target_`` with the signature of what it names.

    Args:
        cfg: A composed config. It is read, not changed.

    Raises:
        ConfigError: A target does not exist, does not know an argument (the nearest one is named), or
            is given a number where it wants text, or the other way round; or a batch would be empty,
            there would be fewer than no workers, or the seed is not one.
    """
    for path, node in _targets(cfg, ""):
        _check_node(path, node)
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    if isinstance(batch_size, int) and batch_size < 1:
        raise ConfigError(f"data.batch_size must be at least 1, not {batch_size}.")
    workers = OmegaConf.select(cfg, "data.num_workers")
    if isinstance(workers, int) and workers < 0:
        raise ConfigError(f"data.num_workers must be at least 0, not {workers}.")
    _check_seed(OmegaConf.select(cfg, "seed"))


def _check_seed(seed: Any) -> None:
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**32):
        raise ConfigError(f"seed must be null or a whole number from 0 to 2**32 - 1, not {seed!r}.")


def _targets(node: Any, path: str) -> Iterator[tuple[str, DictConfig]]:
    if isinstance(node, DictConfig):
        if node.get("_target_") is not None:
            yield path, node
        # An interpolated node is checked where it is defined; a missing value is Hydra's to report.
        for key in map(str, node):
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from _targets(node[key], f"{path}.{key}" if path else key)
    elif isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from _targets(item, f"{path}[{index}]")


def _check_node(path: str, node: DictConfig) -> None:
    name = str(node["_target_"])
    try:
        target = get_object(name)
    except Exception as error:
        raise ConfigError(
            f"{path}._target_: {name!r} cannot be imported. Give the full dotted name of a"
            " class or function that Python finds from the folder where the command is typed."
        ) from error
    call = target.__init__ if inspect.isclass(target) else target
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return  # built in C: it checks by itself
    try:
        hints = typing.get_type_hints(call)
    except Exception:
        hints = {}  # annotations of names that exist for type checkers only
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key in map(str, node):
        if key.startswith("_") and key.endswith("_"):
            continue
        if key not in parameters:
            if not takes_any:
                raise ConfigError(_unknown(path, key, name, [p for p in parameters if p != "self"]))
        elif not OmegaConf.is_missing(node, key):
            _check_value(f"{path}.{key}", node[key], hints.get(key), name)


def _unknown(path: str, key: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    help_ = f"Did you mean {path}.{near[0]}?" if near else f"It takes: {', '.join(known)}."
    return f"{path}.{key}: {name} has no argument {key!r}. {help_}"


def _check_value(path: str, value: Any, hint: Any, name: str) -> None:
    if not isinstance(value, _SCALARS):
        return
    allowed = _scalar_types(hint)
    if allowed is None or type(value) in allowed or (float in allowed and type(value) is int):
        return
    wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
    raise ConfigError(f"{path} must be {wanted}, not {value!r} (an argument of {name}).")


def _scalar_types(hint: Any) -> list[type] | None:
    """Types that ``hint`` allows, or None if it allows more than scalars or is not known."""
    if hint is None or hint is Any:
        return None
    options = (
        typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    )
    return list(options) if all(option in _SCALARS for option in options) else None
