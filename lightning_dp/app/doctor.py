"""``lean-ddp doctor``: is this machine, this environment and this shell fit to train with several ranks?

Looks, changes nothing, starts nothing: what only a try can show is for ``lean-ddp smoke``.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from lightning_dp.app.findings import Finding, add_json_option, judged, report
from lightning_dp.app.parsing import add_options, positive
from lightning_dp.errors import ConfigError, LaunchError
from lightning_dp.internals import binding
from lightning_dp.launch.environment import (
    PID_VARIABLE,
    Placement,
    check_placement,
    started_by_srun,
)

LIGHTNINGS = tuple(name.replace("_", "-") for name in binding.TRAINERS)
# Releases that stole credentials (GHSA-w37p-236h-pfx3), of either package.
MALICIOUS = ("2.6.2", "2.6.3")
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
    findings = examine(os.environ, options.devices, options.num_nodes)
    return report(findings, as_json=options.json, strict=options.strict)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(prog="lean-ddp doctor", description=__doc__)
    add_json_option(made)
    add_options(
        made,
        ("--strict", bool, False, "exit with 1 after a warning too", "a FAIL"),
        ("--devices", positive, 2, "ranks on a machine that a training would have"),
        ("--num-nodes", positive, 1, "machines that it would have"),
    )
    return made


def examine(environment: Mapping[str, str], devices: int, num_nodes: int) -> Iterator[Finding]:
    """Yield what each check found.

    Args:
        environment: Variables as in ``os.environ``.
        devices: Ranks that a Trainer would want on a machine.
        num_nodes: Machines.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": check_versions,
        "binding": lambda: check_binding(environment),
        "devices": check_devices,
        "launch": lambda: check_launch(environment, devices, num_nodes),
        "network": lambda: check_network(environment),
        "limits": check_limits,
    }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding("FAIL", f"{name} cannot be checked: {error!r}", "report this as a bug")


def check_versions() -> Iterator[Finding]:
    """Versions, what this package requires, and releases that must not be installed."""
    python = f"python {platform.python_version()} on {platform.system()}"
    yield judged(os.name == "posix", python, "use Linux or macOS", "warn")
    for requirement in map(Requirement, metadata.requires("lightning_dp") or ()):
        if requirement.marker is None and requirement.name not in LIGHTNINGS:
            version = binding.version_of(requirement.name)
            fits = version is not None and Version(version).base_version in requirement.specifier
            what = f"{requirement.name} {version or 'is missing'}"
            what += "" if fits or version is None else f" is not {requirement.specifier}"
            yield judged(fits, what, f"pip install '{requirement}'")
    for name in LIGHTNINGS:
        if (version := binding.version_of(name)) in MALICIOUS:
            yield Finding(
                "FAIL",
                f"{name} {version} is a malicious release (GHSA-w37p-236h-pfx3)",
                f"pip install '{name}!={',!='.join(MALICIOUS)}', then replace every credential that was"
                " readable on this machine",
            )
        elif version is not None:
            wrong = "" if (fits := binding.is_supported(version)) else f" is not {binding.VERSIONS}"
            yield judged(
                fits, f"{name} {version}{wrong}", f"pip install '{name}{binding.VERSIONS}'"
            )


def check_binding(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Which of Lightning's packages a program's ``LeanDDPStrategy`` would belong to."""
    try:
        package = binding.TRAINERS[binding.bound().package]
    except ConfigError as error:
        yield _refused(error)
        return
    if given := environment.get(binding.VARIABLE):
        why = f"{binding.VARIABLE}={given}"
    elif len(binding.installed()) == 1:
        why = "the only one installed"
    else:
        why = f"unless pytorch_lightning is used first, or {binding.VARIABLE} names it"
    yield Finding("ok", f"lean_ddp belongs to {package}: {why}")


def _refused(error: Exception, before: str = "") -> Finding:
    """What an error of ours says."""
    what, _, fix = str(error).removeprefix("[lean_ddp] ").partition(" Fix: ")
    return Finding("FAIL", before + what, fix)


def check_devices() -> Iterator[Finding]:
    """What there is to compute with, and what accelerators communicate with."""
    import torch
    import torch.distributed as dist

    yield Finding("ok", f"{os.cpu_count()} CPU cores")
    count = torch.cuda.device_count()
    if count == 0:
        yield Finding("ok", "no CUDA device: ranks run on the CPU")
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    yield Finding("ok", f"{count} CUDA device(s): {', '.join(names)}")
    nccl = dist.is_nccl_available()
    version = torch.cuda.nccl.version() if nccl else "missing"  # type: ignore[no-untyped-call]
    fix = "install a torch with NCCL, or process_group_backend=gloo"
    yield judged(nccl, f"NCCL {version}", fix)


def check_launch(environment: Mapping[str, str], devices: int, num_nodes: int) -> Iterator[Finding]:
    """Who would start the ranks from this shell, and whether that can work."""
    place = _placement(environment, devices, num_nodes)
    who = {"torchrun": "torchrun", "slurm": "srun"}.get(
        place.kind, "somebody else (LOCAL_RANK is set)" if place.external else "lean_ddp"
    )
    try:
        warnings = check_placement(place, environment)
    except LaunchError as error:
        yield _refused(error, f"{who} starts the ranks: ")
        return
    yield Finding("ok", f"{who} starts the ranks, for devices={devices} and num_nodes={num_nodes}")
    for text in warnings:
        yield Finding("warn", text, "unset LOCAL_RANK")


def _placement(environment: Mapping[str, str], devices: int, num_nodes: int) -> Placement:
    """What Lightning would find in ``environment``."""
    kind, external = "lightning", "LOCAL_RANK" in environment
    rank, size = "LOCAL_RANK", ""  # Lightning's own environment believes the Trainer
    if "TORCHELASTIC_RUN_ID" in environment:
        kind, external, size = "torchrun", True, "WORLD_SIZE"
    elif started_by_srun(environment):
        kind, external, rank, size = "slurm", True, "SLURM_LOCALID", "SLURM_NTASKS"
    return Placement(
        kind=kind,
        external=external,
        local_rank=int(environment.get(rank, 0)),
        world_size=int(environment.get(size, devices * num_nodes)),
        devices=devices,
        num_nodes=num_nodes,
        # In this shell any rank's variables were inherited: doctor itself is no rank.
        pid=os.getpid() if PID_VARIABLE in environment else 0,
    )


def check_network(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What ranks need to find each other, where ``smoke`` could not say why they do not."""
    if wanted := environment.get("MASTER_PORT"):
        try:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", int(wanted)))
            yield Finding("ok", f"MASTER_PORT={wanted} is free")
        except (OSError, ValueError) as error:
            what = f"MASTER_PORT={wanted} cannot be used: {error}"
            yield Finding("warn", what, "unset MASTER_PORT")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        yield Finding("ok", f"the host name {name} can be resolved")
    except OSError:
        fix = f"echo '127.0.0.1 {name}' >> /etc/hosts, or export GLOO_SOCKET_IFNAME=lo"
        yield Finding("warn", f"the host name {name} cannot be resolved, which gloo tries", fix)


def check_limits() -> Iterator[Finding]:
    """Shared memory and open files, which a small test does not exhaust."""
    import resource

    shm = Path("/dev/shm")
    if shm.exists():
        free_mb = shutil.disk_usage(shm).free >> 20
        fix = "docker run --shm-size=1g ..., or num_workers=0"
        yield judged(free_mb >= MIN_SHM_MB, f"/dev/shm has {free_mb} MiB free", fix, "warn")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft < 0 or soft >= MIN_FILES
    yield judged(enough, f"{soft} open files allowed", f"ulimit -n {MIN_FILES}", "warn")
