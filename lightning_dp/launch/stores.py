"""The store that the ranks meet at: which process hosts it, and on which port."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket

import torch.distributed as dist

from lightning_dp.errors import LaunchError
from lightning_dp.faults.store import Store, port_of, tcp_store, with_prefix

log = logging.getLogger(__name__)

STORE_VARIABLE = "LEAN_DDP_STORE"  # host:port of a store in a process that is no rank


@dataclasses.dataclass(frozen=True)
class RankStore:
    """A store that all ranks reach.

    Attributes:
        store: With a prefix that another job at the same port does not use.
        port: Its port.
        is_hosted_here: Whether this process hosts it.
        outlives_ranks: Whether a process that is no rank hosts it.
    """

    store: Store
    port: int
    is_hosted_here: bool
    outlives_ranks: bool = False

    @classmethod
    def at(cls, store: Store, port: int, *, hosts: bool, outlives_ranks: bool = False) -> RankStore:
        """A store at ``port``, under this job's prefix."""
        names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
        run = "-".join(os.environ.get(name, "") for name in names)
        return cls(with_prefix(f"lean_ddp/{run}", store), port, hosts, outlives_ranks)


def host_store() -> RankStore:
    """Open the ranks' store on a port of this machine that nobody else can take meanwhile.

    The socket listens from here on and is handed to the store, so there is no moment in which the port
    is chosen but not taken. ``MASTER_PORT`` is honoured if it is set and free.

    Raises:
        LaunchError: No port can be opened.
    """
    wanted = int(os.environ.get("MASTER_PORT", 0))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(("127.0.0.1", wanted))
        except OSError:
            if not wanted:
                raise
            log.warning("lean_ddp: port %d (MASTER_PORT) is taken; using another one.", wanted)
            listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(f"[lean_ddp] no port can be opened on 127.0.0.1: {error}.") from error
    port = int(listener.getsockname()[1])
    store = tcp_store("127.0.0.1", port, hosts=True, timeout_s=60.0, listen_fd=listener.detach())
    return RankStore.at(store, port, hosts=True)


def reach_store(rank: int, address: tuple[str, int], timeout_s: float) -> RankStore:
    """Open the store for a rank: a launcher's, torchrun's, or one that rank 0 hosts.

    Args:
        rank: This rank.
        address: Where the cluster environment says that rank 0 is.
        timeout_s: Seconds to wait for its host.

    Raises:
        LaunchError: It cannot be opened or reached.

    Collective: every rank. Blocks until the host is there.
    """
    given = os.environ.get(STORE_VARIABLE)
    host, port = address
    if given:
        host, _, text = given.rpartition(":")
        port = int(text)
    elif dist.is_initialized() and "MASTER_PORT" not in os.environ:
        hosted = _announce_store(rank)
        if isinstance(hosted, RankStore):
            return hosted
        host, port = hosted
    outside = bool(given) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not outside
    store = open_store(host, port, hosts=hosts, timeout_s=timeout_s, rank=rank)
    return RankStore.at(store, port, hosts=hosts, outlives_ranks=outside)


def _announce_store(rank: int) -> RankStore | tuple[str, int]:
    """Rank 0 hosts a store on a free port and tells the others through a group that exists already.

    Collective: every rank of the default group. Blocks.
    """
    address = [("", 0)]
    hosted = None
    if rank == 0:
        store = tcp_store("0.0.0.0", 0, hosts=True, timeout_s=60.0)
        hosted = RankStore.at(store, port_of(store), hosts=True)
        address = [(os.environ.get("MASTER_ADDR", socket.gethostname()), hosted.port)]
    dist.broadcast_object_list(address)
    return hosted or address[0]


def open_store(host: str, port: int, *, hosts: bool, timeout_s: float, rank: int) -> Store:
    """Open the store that the ranks meet at.

    Args:
        host: Address of the process that hosts it.
        port: Its port.
        hosts: Whether this process hosts it.
        timeout_s: Seconds to wait for the host.
        rank: This rank, for messages.

    Raises:
        LaunchError: The port is taken, or nobody hosts the store in time.
    """
    try:
        return tcp_store(host, port, hosts=hosts, timeout_s=timeout_s)
    except (dist.DistError, RuntimeError) as error:
        if hosts:
            raise LaunchError(
                f"[lean_ddp rank {rank}] cannot open port {port} on {host}: {error}. Another job on this "
                "machine may be using it. Fix: choose another one with MASTER_PORT=<port> on all ranks."
            ) from error
        raise LaunchError(
            f"[lean_ddp rank {rank}] rank 0 did not open {host}:{port} within {timeout_s:.0f} s: rank 0 is "
            f"missing. Fix: start all ranks, with the same MASTER_ADDR and MASTER_PORT, or raise "
            f"rendezvous_timeout_s. ({error})"
        ) from error
