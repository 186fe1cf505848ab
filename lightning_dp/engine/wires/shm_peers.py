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

MEET_S = 10.0
_NEWS = struct.Struct("<QQQ")  # slices written, added, read
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_peers: weakref.WeakSet[Peer] = weakref.WeakSet()


class Peer:
    """Another rank.

    Attributes:
        rank: Its number.
        memory: ``(n,)`` uint8, its ring.
        written: Slices that it has told to have written.
        added: Slices of which it has told to have added its share.
        read: Slices that it has told to have read.
        gone: It has closed its connection, and everything that it told was heard.
    """

    def __init__(self, rank: int, connection: socket.socket, memory: Tensor) -> None:
        self.rank = rank
        self.connection = connection
        self.memory = memory
        self.written = self.added = self.read = 0
        self.gone = False
        _peers.add(self)

    def hear(self) -> None:
        """Take in what it has told since. Does not block."""
        try:
            received = self.connection.recv(256 * _NEWS.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if received:
            self.written, self.added, self.read = _NEWS.unpack(received[-_NEWS.size :])
        else:
            self.gone = True

    def tell(self, written: int, added: int, read: int) -> None:
        """Tell it how far this rank is. News are few enough never to fill the connection."""
        # A peer that has gone is no error here: it may have told before all that is needed of it.
        with contextlib.suppress(OSError):
            self.connection.send(_NEWS.pack(written, added, read), socket.MSG_NOSIGNAL)

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
    with contextlib.ExitStack() as temporary, contextlib.ExitStack() as connections:
        here = listener = mine = None
        memory = -1
        with contextlib.suppress(OSError):
            memory = _memory_without_name(ring_bytes)
            temporary.callback(os.close, memory)
            mine = _map(memory)
            listener = temporary.enter_context(_listener(most_ranks))
            here = _machine()
        places = gather((here, listener.getsockname() if listener is not None else None))
        if len(places) > most_ranks or {machine for machine, _ in places} != {here}:
            return None
        if here is None or listener is None or mine is None:
            return None
        # Nobody waits for an answer before all have called, and who cannot answer hangs up: where one rank
        # fails, the others learn it at once.
        lower: list[socket.socket] | None = None
        with contextlib.suppress(OSError):
            lower = _call([address for _, address in places[:rank]], rank, memory, connections)
        if not all(gather(lower is not None)) or lower is None:
            return None
        peers: list[Peer] | None = None
        with contextlib.suppress(OSError, EOFError):
            peers = _answer(listener, len(places) - 1 - rank, rank, memory, lower, connections)
        if peers is None:
            listener.close()
            connections.close()
        if not all(gather(peers is not None)) or peers is None:
            return None
        connections.pop_all()
        return mine, peers


def _call(
    addresses: list[bytes], rank: int, memory: int, connections: contextlib.ExitStack
) -> list[socket.socket]:
    """Connect to every rank below and send it this rank's memory; they need not answer yet.

    Raises:
        OSError: Nobody is there, or something is refused.
    """
    lower = []
    for address in addresses:
        connection = connections.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(MEET_S)
        connection.connect(address)
        socket.send_fds(connection, [bytes([rank])], [memory])
        lower.append(connection)
    return lower


def _answer(
    listener: socket.socket,
    higher: int,
    rank: int,
    memory: int,
    lower: list[socket.socket],
    connections: contextlib.ExitStack,
) -> list[Peer]:
    """Answer every rank above, which has called, and take the answers of those below.

    Raises:
        OSError: Somebody did not answer within ``MEET_S``, or something is refused.
        EOFError: Somebody hung up.
    """
    peers: list[Peer] = []
    listener.settimeout(MEET_S)
    while len(peers) < higher:
        connection = connections.enter_context(listener.accept()[0])
        if not _is_of_this_user(connection):
            connection.close()
            continue
        connection.settimeout(MEET_S)
        other, theirs = _receive(connection)
        socket.send_fds(connection, [bytes([rank])], [memory])
        peers.append(Peer(other, connection, theirs))
    peers += [
        Peer(other, connection, _receive(connection)[1]) for other, connection in enumerate(lower)
    ]
    for peer in peers:
        peer.connection.settimeout(None)
    return sorted(peers, key=lambda peer: peer.rank)


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
    received = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(received)[1] == os.getuid())


def _leave_to_parent() -> None:
    """In a forked process (a data loading worker): the connections are the parent's."""
    for peer in list(_peers):
        peer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
