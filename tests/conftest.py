"""Marks, leak guards, and a line for what could not run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from tests.support import hosts, parity

_NOT_RUN: list[str] = []
# Libraries set these once per process, and they are harmless to later tests.
_ENV_ALLOWED = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
}


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # forked ranks share few cores
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell: every process that a test starts would ignore Ctrl+C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        need = 1 if item.get_closest_marker("gpu") else 0
        if mark := item.get_closest_marker("multi_gpu"):
            need = int(mark.args[0])
        if item.get_closest_marker("hosts") and (reason := hosts.missing()):
            _NOT_RUN.append(f"{item.nodeid} ({reason})")
            item.add_marker(pytest.mark.skip(reason=f"not run: {reason}"))
        if (mark := item.get_closest_marker("library")) and not _imports(mark.args[0]):
            reason = f"{mark.args[0]} is not installed"
            _NOT_RUN.append(f"{item.nodeid} ({reason})")
            item.add_marker(pytest.mark.skip(reason=f"not run: {reason}"))
        if need > found:
            reason = f"needs {need} GPU(s), found {found}"
            _NOT_RUN.append(f"{item.nodeid} ({reason})")
            item.add_marker(pytest.mark.skip(reason=f"not run: {reason}"))


@cache
def _imports(name: str) -> bool:
    with suppress(ImportError):
        return bool(import_module(name))
    return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _NOT_RUN:
        terminalreporter.section("not run")
        for line in _NOT_RUN:
            terminalreporter.write_line(f"not run: {line}")


@pytest.fixture(params=["group", "shared_memory"])
def each_wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: gradients travel over the process group, and through shared memory."""
    monkeypatch.setattr(parity, "SHARED_MEMORY", request.param == "shared_memory")


@pytest.fixture(params=["at_once", "deferred"])
def each_reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: reduced values are read at once, and one step later as on an accelerator."""
    monkeypatch.setattr(parity, "DEFERRED", request.param == "deferred")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test leaves environment, process group, threads and Lightning's rank as it found them."""
    env = dict(os.environ)
    threads = set(threading.enumerate())
    rank = getattr(rank_zero_only, "rank", None)
    yield
    leaked = {
        key
        for key in set(env) | set(os.environ)
        if env.get(key) != os.environ.get(key) and key not in _ENV_ALLOWED
    }
    os.environ.clear()
    os.environ.update(env)
    assert not leaked, f"the test left environment variables changed: {sorted(leaked)}"
    assert not (dist.is_available() and dist.is_initialized()), "the test left a process group"
    extra = [t.name for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    assert not extra, f"the test left threads: {extra}"
    rank_zero_only.rank = rank  # type: ignore[assignment]
