"""Which process hosts the store that the ranks meet at, and on which port."""

from __future__ import annotations

import logging
import os
import socket

import torch.distributed as dist

from lightning_dp.errors import LaunchError
from lightning_dp.faults.store import port_of, tcp_store
from lightning_dp.launch.job import Job
from lightning_dp.launch.rendezvous import open_store

log = logging.getLogger(__name__)

STORE_VARIABLE = "LEAN_DDP_STORE"  # host:port of a store in a process that is no rank


def host_store(job: Job) -> int:
    """Open the ranks' store on a port of this machine that nobody else can take meanwhile.

    The socket listens from here on and is handed to the store, so there is no moment in which the port
    is chosen but not taken. ``MASTER_PORT`` is honoured if it is set and free.
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
    job.adopt(store, port, hosts=True)
    return port


def reach_store(job: Job, rank: int, address: tuple[str, int], timeout_s: float) -> None:
    """Open the store for a rank: a launcher's, torchrun's, or one that rank 0 hosts.

    Args:
        job: Keeps it.
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
        host, port = _announce_store(job, rank)
        if rank == 0:
            return
    outside = bool(given) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not outside
    store = open_store(host, port, hosts=hosts, timeout_s=timeout_s, rank=rank)
    job.adopt(store, port, hosts=hosts, outlives_ranks=outside)


def _announce_store(job: Job, rank: int) -> tuple[str, int]:
    """Rank 0 hosts a store on a free port and tells the others through a group that exists already.

    Collective: every rank of the default group. Blocks.
    """
    address = [("", 0)]
    if rank == 0:
        store = tcp_store("0.0.0.0", 0, hosts=True, timeout_s=60.0)
        job.adopt(store, port_of(store), hosts=True)
        address = [(os.environ.get("MASTER_ADDR", socket.gethostname()), port_of(store))]
    dist.broadcast_object_list(address)
    return address[0]
