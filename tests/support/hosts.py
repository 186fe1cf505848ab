"""Test hosts on one machine: network and process namespaces, joined by a bridge."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A test host: a network of its own and, for each command, processes of its own."""

    name: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """``argv`` as it is run on this host."""
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.name, *inside, *argv]


@functools.cache
def missing() -> str:
    """Why test hosts cannot be made here; empty if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, for network namespaces"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    try:
        with make(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()[:100]}"


@contextlib.contextmanager
def make(count: int) -> Iterator[list[Host]]:
    """``count`` hosts that reach each other; everything is removed at the end."""
    tag = f"lt{random.randrange(16**6):06x}"  # the kernel takes a while to forget a name
    net = f"10.78.{random.randrange(20, 250)}"
    made = [Host(f"{tag}-{index}", f"{net}.{index + 1}") for index in range(count)]
    try:
        _ip("link", "add", tag, "type", "bridge")
        _ip("link", "set", tag, "up")
        for index, host in enumerate(made):
            _ip("netns", "add", host.name)
            outer = f"{tag}v{index}"
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", outer, "master", tag, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
        yield made
    finally:
        for host in made:
            _ip("netns", "del", host.name, check=False)
        _ip("link", "del", tag, check=False)


def _ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=True, text=True)
