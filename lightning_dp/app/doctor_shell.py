"""What ``lean-ddp doctor`` finds in the environment of a shell and in the network of a machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

from lightning_dp.app.findings import Finding
from lightning_dp.errors import LaunchError
from lightning_dp.launch.environment import PID_VARIABLE, Placement, check_placement


def check_launch(environment: Mapping[str, str], devices: int, num_nodes: int) -> Iterator[Finding]:
    """Who would start the ranks from this shell, and whether that can work."""
    place = _placement(environment, devices, num_nodes)
    mode = {
        "torchrun": "torchrun starts the ranks",
        "slurm": "srun starts the ranks",
        "lightning": "somebody else starts the ranks (LOCAL_RANK is set)"
        if place.external
        else "lean_ddp starts the ranks",
    }[place.kind]
    try:
        warnings = check_placement(place, environment)
    except LaunchError as error:
        what, _, fix = str(error).removeprefix("[lean_ddp] ").partition(" Fix: ")
        yield Finding("FAIL", f"{mode}: {what}", fix)
        return
    yield Finding("ok", f"{mode}, for devices={devices} and num_nodes={num_nodes}")
    for text in warnings:
        yield Finding("warn", text, "unset LOCAL_RANK")
    if place.kind == "torchrun" and environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        yield Finding(
            "ok", "torchrun's store is shared; restarts meet under new names all the same"
        )


def _placement(environment: Mapping[str, str], devices: int, num_nodes: int) -> Placement:
    """What Lightning would find in ``environment``."""
    local = int(environment.get("LOCAL_RANK", 0))
    size = devices * num_nodes
    kind, external = "lightning", "LOCAL_RANK" in environment
    if "TORCHELASTIC_RUN_ID" in environment:
        kind, external, size = "torchrun", True, int(environment.get("WORLD_SIZE", size))
    elif "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    ):
        kind, external, size = "slurm", True, int(environment["SLURM_NTASKS"])
        local = int(environment.get("SLURM_LOCALID", 0))
    # In this shell any rank's variables were inherited: doctor itself is no rank.
    pid = os.getpid() if PID_VARIABLE in environment else 0
    return Placement(kind, external, local, size, devices, num_nodes, pid)


def check_ports(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether ranks on this machine can reach each other."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
        yield Finding("ok", "a port can be opened on 127.0.0.1")
    except OSError as error:
        yield Finding(
            "FAIL",
            f"no port can be opened on 127.0.0.1: {error}",
            "allow programs of this machine to listen there (firewall, container policy)",
        )
    wanted = environment.get("MASTER_PORT")
    if wanted:
        try:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", int(wanted)))
            yield Finding("ok", f"MASTER_PORT={wanted} is free")
        except (OSError, ValueError) as error:
            yield Finding(
                "warn", f"MASTER_PORT={wanted} cannot be used: {error}", "unset MASTER_PORT"
            )
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        yield Finding("ok", f"the host name {name} can be resolved")
    except OSError:
        fix = f"echo '127.0.0.1 {name}' >> /etc/hosts, or export GLOO_SOCKET_IFNAME=lo"
        yield Finding("warn", f"the host name {name} cannot be resolved, which gloo tries", fix)
