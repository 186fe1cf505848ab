"""Find mistakes in a composed config before any process is started or any module is built.

Hydra catches a misspelt key that the config does not have; it cannot know what a ``_target_`` takes.
A wrong value would otherwise be met deep inside a library, once on every rank.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Union

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_dp.app.parsing import advice, nearest
from lightning_dp.errors import ConfigError
from lightning_dp.internals import binding

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
    for path, node in targets(cfg):
        _check_node(path, node)
    for key, least in (("data.batch_size", 1), ("data.num_workers", 0)):
        value = OmegaConf.select(cfg, key)
        if isinstance(value, int) and value < least:
            raise ConfigError(f"{key} must be at least {least}, not {value}.")
    seed = OmegaConf.select(cfg, "seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**32):
        raise ConfigError(f"seed must be null or a whole number from 0 to 2**32 - 1, not {seed!r}.")


def targets(node: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yield every node of a config that has a ``_target_``, with its path."""
    if isinstance(node, DictConfig):
        if node.get("_target_") is not None:
            yield path, node
        # An interpolated node is checked where it is defined; a missing value is Hydra's to report.
        for key in map(str, node):
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from targets(node[key], f"{path}.{key}" if path else key)
    elif isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from targets(item, f"{path}[{index}]")


def _check_node(path: str, node: DictConfig) -> None:
    name = str(node["_target_"])
    try:
        target = get_object(binding.translated(name))
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
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # annotations of names that exist for type checkers only
        hints = typing.get_type_hints(call)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    known = [parameter for parameter in parameters if parameter != "self"]
    for key in map(str, node):
        if key.startswith("_") and key.endswith("_"):
            continue
        if key not in known and not takes_any:
            near = advice(nearest(key, known, f"{path}.")) or f" It takes: {', '.join(known)}."
            raise ConfigError(f"{path}.{key}: {name} has no argument {key!r}.{near}")
        if key in known and not OmegaConf.is_missing(node, key):
            _check_value(f"{path}.{key}", node[key], hints.get(key, Any), name)


def _check_value(path: str, value: Any, hint: Any, name: str) -> None:
    """Compare a scalar with an annotation that allows scalars alone."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    allowed = typing.get_args(hint) if union else (hint,)
    if not isinstance(value, _SCALARS) or any(option not in _SCALARS for option in allowed):
        return
    if type(value) not in allowed and not (float in allowed and type(value) is int):
        wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
        raise ConfigError(f"{path} must be {wanted}, not {value!r} (an argument of {name}).")
