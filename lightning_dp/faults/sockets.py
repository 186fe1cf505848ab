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

_FD_DIR = "/proc/self/fd"
_TCP = (socket.AF_INET, socket.AF_INET6)


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

    def close_all(self) -> None:
        """Shut both directions of every remembered connection down."""
        if os.getpid() != self.pid:  # a forked worker must not cut its parent's connections
            return
        for fd, inode in _connections(self.spared_port).items():
            if self._known.get(fd) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
        self._known.clear()


def _connections(spared_port: int) -> dict[int, int]:
    """Connected TCP sockets of this process, save those of a port: descriptor -> inode. Changes none.

    Each is asked: the kernel's table of all connections takes a hundred times as long to read.
    """
    if sys.platform != "linux":
        return {}
    found: dict[int, int] = {}
    for name in os.listdir(_FD_DIR):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            target = os.readlink(f"{_FD_DIR}/{name}")
            if target.startswith("socket:["):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.type == socket.SOCK_STREAM and sock.family in _TCP:
                        ports = (sock.getsockname()[1], sock.getpeername()[1])
                        if spared_port not in ports:
                            found[int(name)] = int(target[8:-1])
    return found
