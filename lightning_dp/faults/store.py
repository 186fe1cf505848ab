"""The stores of ``torch.distributed``, with the types that its stubs leave out."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, cast

import torch.distributed as dist


class Store(Protocol):
    """What is used of a key-value store that all ranks reach."""

    def get(self, key: str) -> bytes:
        """The value; waits for a key that is missing."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it; a missing one is 0."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the value if it is ``expected`` ("" for missing); return what it holds then."""

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""

    def clone(self) -> Store:
        """The same keys through a connection of its own."""


def tcp_store(
    host: str, port: int, *, hosts: bool, timeout_s: float, listen_fd: int | None = None
) -> Store:
    """A store at ``host:port``; this process serves it if ``hosts``, sharing a server it has there."""
    make = getattr(dist, "TCPStore")  # noqa: B009 - the stubs do not export it
    store = make(
        host,
        port,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,
        master_listen_fd=listen_fd,
    )
    return cast(Store, store)


def port_of(store: Store) -> int:
    """The port of a store made by :func:`tcp_store`."""
    return int(getattr(store, "port"))  # noqa: B009 - not part of the protocol


def with_prefix(prefix: str, store: Store) -> Store:
    """``store`` with every key below ``prefix``."""
    return cast(Store, getattr(dist, "PrefixStore")(prefix, store))  # noqa: B009


def empty_store() -> Store:
    """A store that only this process sees."""
    return cast(Store, getattr(dist, "HashStore")())  # noqa: B009
