"""A mistake on the command line ends in one paragraph that says what to type instead."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hydra.errors import CompactHydraException, ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_dp.app.parsing import advice, nearest
from lightning_dp.errors import ConfigError, LaunchError
from lightning_dp.internals.binding import FABRICS

T = TypeVar("T")
_NO_KEY = re.compile(r"Could not (override|delete from config\.) '([^'@]+)'")


def explained(task: Callable[[DictConfig], T]) -> Callable[[DictConfig], T]:
    """Let Hydra print the mistakes that explain themselves without a traceback; exit code 1."""

    @functools.wraps(task)
    def wrapper(cfg: DictConfig) -> T:
        try:
            return task(cfg)
        except MissingMandatoryValue as error:
            key = error.full_key
            raise CompactHydraException(f"{key} has no value; give one: {key}=VALUE") from None
        except OmegaConfBaseException as error:
            # Without a cause: Hydra would print OmegaConf's text a second time.
            raise CompactHydraException(f"{type(error).__name__}: {error}") from None
        except _that_explain_themselves() as error:
            raise CompactHydraException(f"{type(error).__name__}: {error}") from error

    return wrapper


def _that_explain_themselves() -> tuple[type[Exception], ...]:
    """Our errors and Lightning's that say what to change. Lightning is not imported to find out."""
    modules = [sys.modules.get(f"{name}.utilities.exceptions") for name in FABRICS.values()]
    theirs = [module.MisconfigurationException for module in modules if module is not None]
    return (ConfigError, LaunchError, *theirs)


def explain(
    error: ConfigCompositionException | ValueError,
    overrides: Sequence[str],
    compose: Callable[[list[str]], DictConfig],
    options: Callable[[str], Sequence[str]],
) -> str | None:
    """Say what is wrong with an override, and the nearest that exists.

    Args:
        error: Hydra's.
        overrides: As typed.
        compose: Composes the same config from other overrides.
        options: The choices of a config group; of "" the primary configs.

    Returns:
        One paragraph, or None where Hydra's own text has to do.
    """
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        return _no_choice(group, name, options(group))
    if isinstance(error, ValueError):
        # ``model=3``: Hydra takes names alone for the choices of a group.
        for group, _, name in (text.partition("=") for text in overrides):
            if not group:
                return f"={name}: there is no name before the '='."
            if name not in (known := options(group)) and known:
                return _no_choice(group, name, known)
        return None
    if found := _NO_KEY.search(str(error)):
        typed = next((text for text in overrides if _key(text) == found[2]), found[2])
        cfg = compose([text for text in overrides if options(_key(text))])  # what keys there are
        return f"{typed}: there is no {found[2]}.{_no_key(found[2], typed, cfg)}"
    return None


def _key(override: str) -> str:
    """The key of ``override``, without the sign in front of it."""
    return override.partition("=")[0].lstrip("~+")


def _no_choice(group: str, name: str, known: Sequence[str]) -> str | None:
    where = f"{group}=" if group else "--config-name="
    near = advice(nearest(name, known, where), known)
    return f"{where}{name}: there is no such file.{near}" if known else None


def _no_key(key: str, typed: str, cfg: DictConfig) -> str:
    above, dot, last = key.rpartition(".")
    keys = list(_keys(OmegaConf.to_container(cfg, resolve=False)))
    if not key.startswith("hydra."):
        keys = [name for name in keys if name.partition(".")[0] != "hydra"]
    beside = [name.removeprefix(above + dot) for name in keys if name.rpartition(".")[0] == above]
    elsewhere = [name for name in keys if name.endswith(f".{last}")][:3]
    if not beside:  # a part above is misspelt, has nothing below it, or refers to another part
        known = [name for name in keys if "." not in name]
        return advice(elsewhere or nearest(key, keys), known)
    add = "" if typed.startswith("~") else f" To add a new key: +{typed}"
    return advice(nearest(last, beside, above + dot) or elsewhere, beside) + add


def _keys(node: Any, above: str = "") -> Iterator[str]:
    """Every key of a config, with those above it; a reference (``${...}``) has none below it."""
    for name, value in node.items() if isinstance(node, dict) else ():
        yield f"{above}{name}"
        yield from _keys(value, f"{above}{name}.")
