"""A mistake on the command line ends in one paragraph that says what to type instead."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hydra.errors import CompactHydraException, ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_dp.errors import ConfigError, LaunchError

T = TypeVar("T")
_NO_KEY = re.compile(r"Could not (override|delete from config\.) '([^'@]+)'")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MOST_NAMES = 12


def explained(task: Callable[[DictConfig], T]) -> Callable[[DictConfig], T]:
    """Let Hydra print the mistakes that explain themselves without a traceback; exit code 1."""

    @functools.wraps(task)
    def wrapper(cfg: DictConfig) -> T:
        try:
            return task(cfg)
        except OmegaConfBaseException as error:
            # Without a cause: Hydra would print OmegaConf's text a second time.
            raise CompactHydraException(_of_omegaconf(error)) from None
        except Exception as error:
            if not _explains_itself(error):
                raise
            raise CompactHydraException(f"{type(error).__name__}: {error}") from error

    return wrapper


def _of_omegaconf(error: OmegaConfBaseException) -> str:
    key = error.full_key
    if isinstance(error, MissingMandatoryValue) and key:
        return f"{key} has no value; give one: {key}=VALUE"
    return f"{type(error).__name__}: {error}"


def _explains_itself(error: Exception) -> bool:
    """Whether the message alone says what to change. Lightning is not imported to find out."""
    known: tuple[type[Exception], ...] = (ConfigError, LaunchError)
    module = sys.modules.get("lightning.fabric.utilities.exceptions")
    if module is not None:
        known = (*known, module.MisconfigurationException)
    return isinstance(error, known)


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
        return _no_file(error.missing_cfg_file or "", overrides, options)
    if isinstance(error, ValueError):
        return _number_for_a_file(overrides, options)
    found = _NO_KEY.search(str(error))
    if found is None:
        return None
    key = found[2]
    try:
        cfg = compose([text for text in overrides if _key(text) != key])
    except ConfigCompositionException:  # there is a second mistake
        cfg = compose([])
    typed = next((text for text in overrides if _key(text) == key), key)
    addable = found[1] == "override" and not _through_reference(key, cfg)
    advice = f" To add a new key: +{typed}" if addable else ""
    return f"{typed}: {_no_key(key, typed.partition('=')[2], cfg)}{advice}"


def _key(override: str) -> str:
    """The key of ``override``, without the sign in front of it."""
    return override.partition("=")[0].lstrip("~+")


def _no_file(
    file: str, overrides: Sequence[str], options: Callable[[str], Sequence[str]]
) -> str | None:
    group, _, name = file.removesuffix(".yaml").rpartition("/")
    known = options(group)
    if not known:
        return None
    if not group:
        return (
            f"--config-name={name}: there is no such config.{_guess(name, known, '--config-name=')}"
        )
    typed = next((text for text in overrides if _key(text).partition("@")[0] == group), None)
    where = f"{group}={name}" if typed else f"{group}/{name}.yaml"
    return f"{where}: there is no such file.{_guess(name, known, f'{group}=')}"


def _number_for_a_file(
    overrides: Sequence[str], options: Callable[[str], Sequence[str]]
) -> str | None:
    """``model=3``: Hydra takes names alone for the choices of a group, and raises a ValueError."""
    for text in overrides:
        group, _, value = text.partition("=")
        if not group:
            return f"{text}: there is no name before the '='."
        if value.lstrip("-").isdecimal() and options(group):
            return _no_file(f"{group}/{value}", overrides, options)
    return None


def _no_key(key: str, value: str, cfg: DictConfig) -> str:
    *parents, last = key.split(".")
    node, above = cfg, ""
    for part in parents:
        if part not in node:
            return f"there is no {above}{part}.{_guess(part, _names(node), above)}"
        child = None if OmegaConf.is_missing(node, part) else node[part]
        if not isinstance(child, DictConfig):
            return f"{above}{part} has no keys below it."
        node, above = child, f"{_reference(node, part) or above + part}."
    near = difflib.get_close_matches(last, _names(node), n=1)
    if not near:
        # Typed in the wrong place: max_epochs for trainer.max_epochs.
        elsewhere = [path for path in _leaves(cfg) if path.rpartition(".")[2] == last]
        if elsewhere:
            return f"there is no {key}. Did you mean {' or '.join(elsewhere[:3])}?"
    return f"there is no {key}.{_guess(last, _names(node), above)}"


def _reference(node: DictConfig, key: str) -> str | None:
    """The key that ``${key}`` at ``key`` refers to: that is where a value can be set."""
    raw = OmegaConf.to_container(node, resolve=False)
    found = _REFERENCE.fullmatch(str(raw.get(key))) if isinstance(raw, dict) else None
    return found[1] if found else None


def _through_reference(key: str, cfg: DictConfig) -> bool:
    """Whether a node above ``key`` is a reference to another one: nothing can be added below it."""
    parents = key.split(".")[:-1]
    for count in range(1, len(parents) + 1):
        *above, last = parents[:count]
        node = OmegaConf.select(cfg, ".".join(above)) if above else cfg
        if isinstance(node, DictConfig) and _reference(node, last):
            return True
    return False


def _guess(name: str, known: Sequence[str], before: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f" Did you mean {before}{near[0]}?"
    if len(known) > _MOST_NAMES:
        return " --cfg job prints what there is."
    return f" There is: {', '.join(known)}."


def _names(node: DictConfig) -> list[str]:
    return [str(key) for key in node if key != "hydra"]


def _leaves(node: DictConfig, above: str = "") -> Iterator[str]:
    for key in _names(node):
        yield f"{above}{key}"
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            child = node[key]
            if isinstance(child, DictConfig):
                yield from _leaves(child, f"{above}{key}.")
