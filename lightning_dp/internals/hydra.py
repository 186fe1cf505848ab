"""Every private name of Hydra that we touch; as :mod:`lightning_dp.internals.trainer`.

Hydra is imported only where the program has imported it already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# How many of a started rank's overrides, the last ones, are values that rank 0 drew.
PINNED_VARIABLE = "LEAN_DDP_PINNED"


@dataclasses.dataclass(frozen=True)
class HydraJob:
    """The Hydra job that runs here.

    Attributes:
        config_flags: --config-path, --config-name and --config-dir as given.
        task_overrides: This job's own, the sweep's values among them; not what rank 0 drew.
        hydra_overrides: As given; those that are not about a job are left out for other ranks.
        output_dir: The job's folder.
        cwd: The working directory at the start.
        settings: Resolved values that other ranks cannot find themselves (``hydra.job.num``).
        log_file: The job's log file, if it writes one.
        launcher: The class of the sweep's launcher; empty outside of a sweep.
        number: Tells jobs of one process apart.
    """

    config_flags: tuple[str, ...]
    task_overrides: tuple[str, ...]
    hydra_overrides: tuple[str, ...]
    output_dir: str
    cwd: str
    settings: tuple[tuple[str, str], ...] = ()
    log_file: str | None = None
    launcher: str = ""
    number: int = 0

    def describe(self) -> str:
        """What the ranks compare: the job's own overrides."""
        return " ".join(self.task_overrides)


def hydra_job() -> HydraJob | None:
    """The Hydra job that runs here, or None. Never imports Hydra by itself."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    cfg = module.HydraConfig.get()
    from omegaconf import OmegaConf

    def value(path: str) -> str | None:
        with contextlib.suppress(Exception):
            found = OmegaConf.select(cfg, path)
            return None if found is None else str(found)
        return None

    paths = ("job.num", "job.id", "job.name", "sweep.dir", "sweep.subdir")
    settings = [(f"hydra.{path}", found) for path in paths if (found := value(path)) is not None]
    sweeps = value("mode") == "RunMode.MULTIRUN"
    overrides = tuple(map(str, cfg.overrides.task))
    return HydraJob(
        config_flags=_hydra_flags(sys.argv[1:]),
        task_overrides=overrides[: len(overrides) - int(os.environ.get(PINNED_VARIABLE, "0"))],
        hydra_overrides=tuple(map(str, cfg.overrides.hydra)),
        output_dir=str(cfg.runtime.output_dir),
        cwd=str(cfg.runtime.cwd),
        settings=tuple(settings),
        log_file=value("job_logging.handlers.file.filename"),
        launcher=(value("launcher._target_") or "") if sweeps else "",
        number=int(value("job.num") or 0),
    )


def _hydra_flags(arguments: list[str]) -> tuple[str, ...]:
    """The options that say which config is composed; falls back to looking for their names."""
    names = ("config_path", "config_name", "config_dir")
    try:
        from hydra._internal.utils import get_args_parser

        parsed, _ = get_args_parser().parse_known_args(arguments)
        found = [(name, getattr(parsed, name, None)) for name in names]
        return tuple(
            f"--{name.replace('_', '-')}={text}" for name, text in found if text is not None
        )
    except (ImportError, SystemExit):
        long = tuple(f"--{name.replace('_', '-')}=" for name in names)
        return tuple(argument for argument in arguments if argument.startswith(long))


def _of_run_job(name: str) -> Any:
    """A local of Hydra's function that runs the job; None without one."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "run_job":
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_globals.get("__name__") != "hydra.core.utils":
        return None
    return frame.f_locals.get(name)


# A resolver by name. OmegaConf's own and Hydra's give all ranks of a job the same, or what is a rank's own.
_RESOLVER = re.compile(r"\$\{\s*(?!(?:oc\.\w+|hydra)\s*:)([A-Za-z_][\w.]*)\s*:")


def pin_drawn_values() -> dict[str, Any]:
    """Give the job's config for good what its resolvers drew: times and random numbers.

    Such a resolver would give each rank a value of its own. ``${now:}`` keeps its first value, since it is
    registered with a cache. One without a cache that gives two values when it is asked twice has a new one
    at each read: it is pinned to the last. Any other gives the same everywhere, and is left alone.

    Returns:
        The values by key, for ranks that compose the config themselves. Empty outside of a Hydra job.
    """
    config = _of_run_job("task_cfg")
    if config is None:
        return {}
    from omegaconf import OmegaConf, open_dict, read_write

    def plain(value: Any) -> Any:
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    pinned = {}
    for key, text in _texts(OmegaConf.to_container(config, resolve=False)):
        names = _RESOLVER.findall(text)
        with contextlib.suppress(Exception):  # a key that cannot be resolved is the reader's error
            first, second = (plain(OmegaConf.select(config, key)) if names else None for _ in "ab")
            if first != second or not OmegaConf.get_cache(config).keys().isdisjoint(names):
                pinned[key] = second
    with read_write(config), open_dict(config):
        for key, value in pinned.items():
            OmegaConf.update(config, key, value, merge=False)
    return pinned


def _texts(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What a config's values are written as, by key; a list is one value."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, str | list):
        yield prefix, str(node)


def one_line(text: str) -> BaseException:
    """An error of which Hydra prints ``text`` and no traceback."""
    from hydra.errors import CompactHydraException

    return CompactHydraException(text)


def on_hydra_job_end(act: Callable[[BaseException | None], BaseException | None]) -> bool:
    """Call ``act(error)`` when the Hydra job that runs here ends; an error that it returns is the job's.

    Hydra keeps a job's callbacks in the frame that runs it and nowhere else. Without one (no Hydra, or
    another version of it) nothing is registered, and the caller has to notice the next job by itself.

    Returns:
        Whether it was registered.
    """
    listening = getattr(_of_run_job("callbacks"), "callbacks", None)
    if not isinstance(listening, list):
        return False
    callbacks: list[Any] = listening
    from hydra.experimental.callback import Callback

    class AtJobEnd(Callback):
        def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
            callbacks.remove(self)
            status = type(job_return.status)
            failed = job_return.status is status.FAILED
            # Asking a failed job for its value raises it, after printing advice.
            error = act(getattr(job_return, "_return_value", None) if failed else None)
            if error is not None:
                job_return.status = status.FAILED
                job_return.return_value = error

    callbacks.append(AtJobEnd())
    return True


Explain = Callable[
    [Any, Sequence[str], Callable[[list[str]], Any], Callable[[str], Sequence[str]]], str | None
]


def explain_composition(explain: Explain) -> bool:
    """Replace the text of errors of composing a config by that of ``explain``, where it has one.

    Hydra composes inside of ``hydra.main``, and prints what goes wrong itself. Without the class that
    composes (another version of Hydra) its own text stays.

    Args:
        explain: Takes the error, the overrides, a function that composes the same config from other
            overrides, and one that lists the choices of a config group.

    Returns:
        Whether it was put in place.
    """
    try:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra.core.object_type import ObjectType
        from hydra.errors import ConfigCompositionException

        original = ConfigLoaderImpl.load_configuration
    except (ImportError, AttributeError):
        return False

    @functools.wraps(original)
    def load(self: Any, config_name: Any, overrides: list[str], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, config_name, overrides, *args, **kwargs)
        except (ConfigCompositionException, ValueError) as error:
            text = None
            with contextlib.suppress(Exception):  # a second mistake: Hydra's text says the first
                text = explain(
                    error,
                    overrides,
                    lambda others: original(self, config_name, others, *args, **kwargs),
                    lambda group: self.get_group_options(group, ObjectType.CONFIG),
                )
            if text is None:
                raise
            raise ConfigCompositionException(text) from error

    ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]
    return True
