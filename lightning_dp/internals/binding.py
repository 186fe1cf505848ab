"""Which of Lightning's two packages this process uses: ``lightning.pytorch`` or ``pytorch_lightning``.

They are two copies of one library: a class of one is no class of the other. ``LeanDDPStrategy`` derives
from one of them, so a process is bound to one, once, when the first class of ours that needs Lightning is
imported. This file decides and imports neither; :mod:`lightning_dp.internals.lightning` imports.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import metadata

from lightning_dp.errors import ConfigError
from lightning_dp.internals.stacks import user_line

VARIABLE = "LEAN_DDP_LIGHTNING"
VERSIONS = ">=2.6,<2.7,!=2.6.2,!=2.6.3"  # of either; 2.6.2 and 2.6.3 were malicious
# For each package on the index the modules that people import: its Trainer's and its Fabric's.
TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@dataclass(frozen=True)
class Binding:
    """The decision.

    Attributes:
        package: A key of ``TRAINERS``.
        why: What made it, for messages.
    """

    package: str
    why: str


_bound: Binding | None = None


def bound() -> Binding:
    """The package of this process; decided now if nothing did.

    The environment's ``LEAN_DDP_LIGHTNING``; else the package whose Trainer was imported; else what is
    installed; ``lightning`` where that leaves both.

    Raises:
        ConfigError: Neither is installed, or not what the environment says.
    """
    if _bound is not None:
        return _bound
    imported = [name for name, trainer in TRAINERS.items() if trainer in sys.modules]
    return _decide(
        (imported or installed() or ["lightning"])[0], "an import of a class of lightning_dp"
    )


def bind(package: str, why: str) -> None:
    """Bind this process to ``package``. The second time it only compares.

    Args:
        package: A key of ``TRAINERS``.
        why: Who needs it; the user's line is added.

    Raises:
        ConfigError: The process is bound to the other package, or this one cannot be used.
    """
    if (_bound or _decide(package, why)).package != package:
        raise ConfigError(conflict(package))


def _decide(package: str, why: str) -> Binding:
    global _bound
    line = user_line()
    binding = Binding(package, f"{why} ({line})" if line else why)
    if given := os.environ.get(VARIABLE):
        binding = Binding(given, f"{VARIABLE}={given}")
    _check(binding)
    _bound = binding
    return binding


def _check(binding: Binding) -> None:
    """Refuse what is not there, and releases that this package is not made for, before they are run."""
    if binding.package not in installed():
        raise ConfigError(
            f"[lean_ddp] {binding.why}, and lean_ddp finds {' and '.join(installed()) or 'neither'} of "
            f"{' and '.join(TRAINERS)}. Fix: pip install 'pytorch-lightning{VERSIONS}'"
        )
    version = version_of(binding.package)
    if version is not None and not is_supported(version):
        name = binding.package.replace("_", "-")
        raise ConfigError(
            f"[lean_ddp] {name} {version} is not {VERSIONS}. Fix: pip install '{name}{VERSIONS}'"
        )


def version_of(package: str) -> str | None:
    """The installed version; ``None`` where nobody recorded it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_supported(version: str) -> bool:
    """Whether this package is made for a release of Lightning."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return Version(version).base_version in SpecifierSet(VERSIONS)


def conflict(package: str) -> str:
    """Why a Trainer of ``package`` cannot have our strategy in this process, and what to change."""
    here = bound()
    return (
        f"[lean_ddp] this process is bound to {TRAINERS[here.package]}, by {here.why}, and this Trainer is "
        f"{TRAINERS[package]}'s. Fix: set {VARIABLE}={package} in the environment, and give lean_ddp to "
        "Trainers of that package only."
    )


def installed() -> list[str]:
    """Which of the two can be imported. Neither is."""
    found = []
    for package in TRAINERS:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None:  # a folder of that name has none
            found.append(package)
    return found


FABRIC = (
    "[lean_ddp] lean_ddp is a strategy for Lightning's Trainer, whose loops, loaders and checkpoints it "
    "follows; Fabric has none of them. Fix: Trainer(strategy='lean_ddp'), or Fabric(strategy='ddp')."
)


def refuse_other_owner() -> None:
    """In the strategy's ``__repr__``: raise where it was given to Fabric or to the other package's Trainer.

    They answer what is no strategy of theirs with a message that shows its ``repr``, and ask nothing else.

    Raises:
        ConfigError: Says what to change.
    """
    module = str(sys._getframe(2).f_globals.get("__name__"))
    if module in [f"{fabric}.connector" for fabric in FABRICS.values()]:
        raise ConfigError(FABRIC)
    for package, trainer in TRAINERS.items():
        if package != bound().package and module.startswith(f"{trainer}."):
            raise ConfigError(conflict(package))


def package_of(cls: type) -> str | None:
    """The package whose class ``cls`` derives from; ``None`` for another class."""
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((root for root in roots if root in TRAINERS), None)


def translated(name: str) -> str:
    """``name``, the full dotted name of something of Lightning's, in the package of this process.

    Example:
        ``lightning.Trainer`` is ``pytorch_lightning.Trainer`` where the process is bound to that.
    """
    here = bound().package
    for modules in (FABRICS, TRAINERS):
        for module in modules.values():
            if name.startswith(f"{module}."):
                return modules[here] + name[len(module) :]
    if name.startswith("lightning."):  # shows what lightning.pytorch has
        return TRAINERS[here] + name[len("lightning") :]
    return name
