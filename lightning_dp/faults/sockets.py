"""Close gloo's connections from outside, so that a rank blocked in a collective gets an error.

[Note: why the sockets] A gloo collective waits in C++ and cannot be cancelled: neither ``abort`` nor
``destroy_process_group`` wakes it while anything holds the group, and an exception's traceback does.
Closing the connections underneath makes it raise on both ends, as if the peer had gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_FD_DIR = "/proc/self/fd"
_ESTABLISHED = "01"  # TCP_ESTABLISHED in /proc/net/tcp


class GroupSockets:
    """The connections that were opened while process groups were made.

    Linux only; elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self.spared_port = 0  # of the ranks' store: whoever is cut off must still learn why
        self.pid = os.getpid()
        self._known: dict[int, int] = {}  # descriptor -> inode, to tell a descriptor used again

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Remember the connections opened inside the ``with`` block."""
        self.pid = os.getpid()  # the object may have been made in the process that forked this one
        before = _connections(self.spared_port)
        yield
        after = _connections(self.spared_port)
        self._known.update({fd: ino for fd, ino in after.items() if before.get(fd) != ino})

    def __len__(self) -> int:
        return len(self._known)

    def close_all(self) -> int:
        """Shut both directions of every remembered connection down; return how many there were."""
        if (
            os.getpid() != self.pid
        ):  # a forked data-loader worker must not cut its parent's connections
            return 0
        closed = 0
        now = _connections(self.spared_port)
        for fd, inode in self._known.items():
            if now.get(fd) != inode:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
                closed += 1
        self._known.clear()
        return closed


def _connections(spared_port: int) -> dict[int, int]:
    """Connected TCP sockets of this process: descriptor -> inode. Only reads; touches no socket."""
    if sys.platform != "linux":
        return {}
    connected = _connected_inodes(spared_port)
    found: dict[int, int] = {}
    for name in os.listdir(_FD_DIR):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{_FD_DIR}/{name}")
            if target.startswith("socket:[") and (inode := int(target[8:-1])) in connected:
                found[int(name)] = inode
    return found


def _connected_inodes(spared_port: int) -> set[int]:
    """Inodes of the established TCP connections of this network namespace, save those of a port."""
    inodes: set[int] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                ports = {int(address.rpartition(":")[2], 16) for address in fields[1:3]}
                if fields[3] == _ESTABLISHED and spared_port not in ports:
                    inodes.add(int(fields[9]))
    return inodes
