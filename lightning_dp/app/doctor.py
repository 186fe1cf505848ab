"""``lean-ddp doctor``: is this machine, this environment and this shell fit to train with several ranks?

Looks, changes nothing, opens no connection to other machines.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from lightning_dp.app.doctor_shell import check_launch, check_ports
from lightning_dp.app.findings import Finding, exit_code, show
from lightning_dp.app.parsing import positive

# Releases that stole credentials (GHSA-w37p-236h-pfx3).
MALICIOUS = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
MIN_SHM_MB = 256
MIN_FILES = 1024


def main(arguments: Sequence[str]) -> int:
    """Run all checks and print them.

    Args:
        arguments: After ``lean-ddp doctor``.

    Returns:
        0, or 1 if something failed (with ``--strict``: was warned about).
    """
    options = parser().parse_args(list(arguments))
    findings = list(examine(os.environ, options.devices, options.num_nodes))
    show(findings, title="lean-ddp doctor", as_json=options.json, strict=options.strict)
    return exit_code(findings, strict=options.strict)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(prog="lean-ddp doctor", description=__doc__)
    made.add_argument(
        "--json", action="store_true", help="print a list of findings as JSON (default: lines)"
    )
    made.add_argument(
        "--strict", action="store_true", help="exit with 1 after a warning too (default: a FAIL)"
    )
    made.add_argument(
        "--devices",
        type=positive,
        default=2,
        help="ranks on a machine that a training would have (default: %(default)s)",
    )
    made.add_argument(
        "--num-nodes",
        type=positive,
        default=1,
        help="machines that it would have (default: %(default)s)",
    )
    return made


def examine(environment: Mapping[str, str], devices: int, num_nodes: int) -> Iterator[Finding]:
    """Yield what each check found.

    Args:
        environment: Variables as in ``os.environ``.
        devices: Ranks that a Trainer would want on a machine.
        num_nodes: Machines.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_devices,
        check_strategy,
        check_configs,
        lambda: check_launch(environment, devices, num_nodes),
        lambda: check_ports(environment),
        check_limits,
    ]
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = getattr(check, "__name__", "check")
            yield Finding("FAIL", f"{name} could not be done: {error!r}", "report this as a bug")


def check_versions() -> Iterator[Finding]:
    """Versions, what this package requires, and releases that must not be installed."""
    yield Finding("ok", f"python {platform.python_version()} on {platform.system()}")
    required = [Requirement(text) for text in metadata.requires("lightning_dp") or ()]
    for requirement in required:
        if requirement.marker is None:
            yield _check_requirement(requirement)
    for name, bad in MALICIOUS.items():
        version = _version(name)
        if version in bad:
            yield Finding(
                "FAIL",
                f"{name} {version} is a malicious release (GHSA-w37p-236h-pfx3)",
                f"pip install '{name}!={bad[0]},!={bad[1]}', then replace every credential that was "
                "readable on this machine",
            )
    if _version("lightning") and _version("pytorch-lightning"):
        yield Finding(
            "warn",
            "lightning and pytorch-lightning are both installed; lean_ddp works with the first",
            "write 'import lightning.pytorch as pl' everywhere",
        )


def _check_requirement(requirement: Requirement) -> Finding:
    version = _version(requirement.name)
    if version is None:
        return Finding("FAIL", f"{requirement.name} is missing", f"pip install '{requirement}'")
    if Version(version).base_version not in requirement.specifier and (
        not requirement.specifier.contains(version, prereleases=True)
    ):
        what = f"{requirement.name} {version} is not {requirement.specifier}"
        return Finding("FAIL", what, f"pip install '{requirement}'")
    return Finding("ok", f"{requirement.name} {version}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_devices() -> Iterator[Finding]:
    """What there is to compute and to communicate with."""
    import torch
    import torch.distributed as dist

    yield Finding("ok", f"{os.cpu_count()} CPU cores")
    if not dist.is_available():
        yield Finding(
            "FAIL",
            "this torch has no torch.distributed",
            "pip install --force-reinstall torch (a build with torch.distributed)",
        )
        return
    gloo = dist.is_gloo_available()
    yield Finding(
        "ok" if gloo else "FAIL",
        f"gloo (CPU) is {'there' if gloo else 'missing'}",
        "" if gloo else "pip install --force-reinstall torch (a build with gloo)",
    )
    count = torch.cuda.device_count()
    if count == 0:
        yield Finding("ok", "no CUDA device: ranks run on the CPU")
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    yield Finding("ok", f"{count} CUDA device(s): {', '.join(names)}")
    nccl = dist.is_nccl_available()
    version = str(torch.cuda.nccl.version()) if nccl else "missing"  # type: ignore[no-untyped-call]
    fix = "" if nccl else "install a torch with NCCL, or process_group_backend=gloo"
    yield Finding("ok" if nccl else "FAIL", f"NCCL {version}", fix)


def check_strategy() -> Iterator[Finding]:
    """The names that a Trainer knows."""
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_dp

    names = [name for name in StrategyRegistry if name.startswith("lean_ddp")]
    here = "lean_ddp" in names
    yield Finding(
        "ok" if here else "FAIL",
        f"lightning_dp {lightning_dp.__version__}: strategy lean_ddp is registered"
        if here
        else "lean_ddp is not registered",
        "" if here else "import lightning_dp before the Trainer is made",
    )


def check_configs() -> Iterator[Finding]:
    """Whether this Hydra finds and composes our configs."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    conf = resources.files("lightning_dp.conf")
    if not conf.joinpath("strategy").joinpath("lean_ddp.yaml").is_file():
        what = "the config files of lightning_dp are missing"
        yield Finding("FAIL", what, "pip install --force-reinstall lightning_dp")
        return
    GlobalHydra.instance().clear()
    with initialize_config_module("lightning_dp.conf", version_base="1.3"):
        cfg = compose("train")
    target = cfg.strategy["_target_"]
    yield Finding("ok", f"pkg://lightning_dp.conf composes; strategy: {target}")


def check_limits() -> Iterator[Finding]:
    """Shared memory, open files, and how a rank is ended with its parent."""
    shm = Path("/dev/shm")
    if shm.exists():
        free_mb = shutil.disk_usage(shm).free >> 20
        small = free_mb < MIN_SHM_MB
        fix = "docker run --shm-size=1g ..., or num_workers=0" if small else ""
        yield Finding("warn" if small else "ok", f"/dev/shm has {free_mb} MiB free", fix)
    try:
        import resource
    except ImportError:
        yield Finding("warn", "this system is not tested", "use Linux or macOS")
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < MIN_FILES
    yield Finding(
        "warn" if few else "ok",
        f"{soft} open files allowed",
        f"ulimit -n {MIN_FILES}" if few else "",
    )
    how = "by the kernel" if sys.platform == "linux" else "by looking twice a second"
    yield Finding("ok", f"ranks end with the process that started them ({how})")
