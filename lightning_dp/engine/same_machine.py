"""Ranks on one machine meet: each maps the memory of all others, and is connected to them.

[Note: why sockets] How far a rank is, is told over sockets and not through the memory: Python has no
memory barrier, but a system call at either end is one; whoever waits can sleep; and the end of a process
closes its sockets, so that the others learn of it at once. The memory has no name: it goes to the others
over the same sockets, so that a run that is killed leaves nothing behind. The sockets' names are of Linux's
kind that is not in the file system either, and that belongs to one network namespace.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MEET_S = 20.0
_NEWS = struct.Struct("<QQ")  # slices written, slices read
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_peers: weakref.WeakSet[Peer] = weakref.WeakSet()


class Peer:
    """Another rank.

    Attributes:
        rank: Its number.
        memory: ``(n,)`` uint8, its ring.
        written: Slices that it has told to have written.
        read: Slices that it has told to have read.
        gone: It has closed its connection, and everything that it told was heard.
    """

    def __init__(self, rank: int, connection: socket.socket, memory: Tensor) -> None:
        self.rank = rank
        self.connection = connection
        self.memory = memory
        self.written = 0
        self.read = 0
        self.gone = False
        _peers.add(self)

    def hear(self) -> None:
        """Take in what it has told since. Does not block."""
        try:
            told = self.connection.recv(256 * _NEWS.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            told = b""
        if told:
            self.written, self.read = _NEWS.unpack(told[-_NEWS.size :])
        else:
            self.gone = True

    def tell(self, written: int, read: int) -> None:
        """Tell it how far this rank is. News are few enough never to fill the connection."""
        # A peer that has gone is no error here: it may have told before all that is needed of it.
        with contextlib.suppress(OSError):
            self.connection.send(_NEWS.pack(written, read), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close the connection."""
        _peers.discard(self)
        self.connection.close()


def meet(
    rank: int, ring_bytes: int, most_ranks: int, gather: Callable[[Any], list[Any]]
) -> tuple[Tensor, list[Peer]] | None:
    """Return this rank's memory and the other ranks; ``None``, on all of them, where that is not possible.

    Args:
        rank: This rank.
        ring_bytes: Size of each rank's memory.
        most_ranks: Do not, if there are more.
        gather: Returns every rank's value, by rank.

    Collective: every rank. Blocks.
    """
    with contextlib.ExitStack() as stack:
        here = listener = None
        memory = -1
        with contextlib.suppress(OSError):
            memory = _memory_without_name(ring_bytes)
            stack.callback(os.close, memory)
            listener = stack.enter_context(_listener(most_ranks))
            here = _machine()
        places = gather((here, listener.getsockname() if listener is not None else None))
        if len(places) > most_ranks or {machine for machine, _ in places} != {here}:
            return None
        if here is None or listener is None:
            return None
        mine = _map(memory)
        peers: list[Peer] | None = None
        with contextlib.suppress(OSError, EOFError):
            peers = _connect(rank, listener, memory, [address for _, address in places])
        if all(gather(peers is not None)):
            return mine, peers or []
        for peer in peers or ():
            peer.close()
    return None


def _connect(rank: int, listener: socket.socket, memory: int, addresses: list[bytes]) -> list[Peer]:
    """Connect to every rank below, hear from every rank above, and exchange memory.

    Raises:
        OSError: Somebody did not come within ``MEET_S``.
        EOFError: Somebody came and left.
    """
    lower: dict[int, socket.socket] = {}
    peers: dict[int, Peer] = {}
    with contextlib.ExitStack() as if_it_fails:
        for other in range(rank):
            lower[other] = if_it_fails.enter_context(socket.socket(socket.AF_UNIX))
            lower[other].settimeout(MEET_S)
            lower[other].connect(addresses[other])
            socket.send_fds(lower[other], [bytes([rank])], [memory])
        listener.settimeout(MEET_S)
        while len(peers) < len(addresses) - 1 - rank:
            connection = if_it_fails.enter_context(listener.accept()[0])
            if not _is_of_this_user(connection):
                connection.close()
                continue
            connection.settimeout(MEET_S)
            other, theirs = _receive(connection)
            peers[other] = Peer(other, connection, theirs)
            socket.send_fds(connection, [bytes([rank])], [memory])
        for other, connection in lower.items():
            peers[other] = Peer(other, connection, _receive(connection)[1])
        if_it_fails.pop_all()
    for peer in peers.values():
        peer.connection.settimeout(None)
    return [peers[other] for other in sorted(peers)]


def _receive(connection: socket.socket) -> tuple[int, Tensor]:
    """Return the rank at the other end and its memory."""
    data, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not data or len(fds) != 1:
        raise EOFError("a rank left while the ranks met")
    try:
        return data[0], _map(fds[0])
    finally:
        os.close(fds[0])


def _machine() -> tuple[str, int]:
    """What two processes have in common if they can meet: a boot and a network namespace.

    Raises:
        OSError: This machine does not tell.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot, os.stat("/proc/self/ns/net").st_ino


def _memory_without_name(nbytes: int) -> int:
    """Return a descriptor of memory that can be shared.

    Raises:
        OSError: The system has none, or refused.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError("needs Linux: sockets and memory without a name in the file system")
    memory = os.memfd_create("lightning_dp")
    os.ftruncate(memory, nbytes)
    return memory


def _map(memory: int) -> Tensor:
    """Map shared memory as ``(n,)`` uint8; the mapping lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8)


def _listener(backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0lightning_dp-{secrets.token_hex(16)}")
    listener.listen(backlog)
    return listener


def _is_of_this_user(connection: socket.socket) -> bool:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.getuid())


def _leave_to_parent() -> None:
    """In a forked process (a data loading worker): the connections are the parent's."""
    for peer in list(_peers):
        peer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
