"""Marks, leak guards, and a line for what could not run."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.rank_zero import rank_zero_only

from tests.support import grounds, hosts, parity

# Libraries set these once per process, and they are harmless to later tests.
_ENV_ALLOWED = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
}


# A loaded machine is slow, and says nothing about an example.
settings.register_profile("lean_ddp", deadline=None)
settings.load_profile("lean_ddp")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # forked ranks share few cores
    _read_entry_points_once()
    _seed_only_devices_that_are_there()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell: every process that a test starts would ignore Ctrl+C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_entry_points_once() -> None:
    """Each Trainer looks for callbacks in the files of all installed packages, a fourth of a short fit."""
    registry.entry_points = cache(registry.entry_points)  # type: ignore[assignment]
    registry.entry_points(group="lightning.pytorch.callbacks_factory")  # before ranks are forked


def _seed_only_devices_that_are_there() -> None:
    """``torch.manual_seed`` writes the stack down for each kind of device that might come to be used later.

    These are milliseconds each time, half of a test that seeds every step.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sample(config, items)
    for item in items:
        reason = grounds.why_not(grounds.needed_gpus(item))
        if (mark := item.get_closest_marker("cpu_only")) and grounds.needed_gpus(item):
            reason = f"on the CPU only: {mark.args[0]}"
        if item.get_closest_marker("hosts"):
            reason = reason or hosts.missing()
        for mark in item.iter_markers("library"):
            if not _imports(mark.args[0]):
                reason = reason or f"{mark.args[0]} is not installed"
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"not run: {_place(item)} ({reason})"))


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests over each wire that run in slices, keep every third; all with LEAN_DDP_WHOLE_TABLES."""
    if os.environ.get("LEAN_DDP_WHOLE_TABLES"):
        return
    sliced = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.callspec.params.get("each_wire", (None, None))[1] == "shard"
    ]
    left = {item for number, item in enumerate(sliced) if number % 3}
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def _place(item: pytest.Item) -> str:
    names = ("multi_gpu", "gpu", "hosts", "library")
    return next(name for name in names if item.get_closest_marker(name))


@cache
def _imports(name: str) -> bool:
    with suppress(ImportError):
        return bool(import_module(name))
    return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not run: how many by place and reason, by name where such tests were asked for.

    Read from the reports: workers collect and run the tests, and this process gets their reports.
    """
    options = terminalreporter.config.option
    named = options.markexpr or options.verbose > 0
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        what = str(report.longrepr[-1]).removeprefix("Skipped: ")
        counts[what if "not run: " in what else f"{what}: {report.nodeid}"] += 1
        if named and "not run: " in what:
            terminalreporter.write_line(f"{what}: {report.nodeid}")
    for what, count in sorted(counts.items()):
        terminalreporter.write_line(f"{what}: {count} tests" if "not run: " in what else what)


def _on(place: tuple[grounds.Ground, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(grounds, "CURRENT", place[0])
    return place[1]


@pytest.fixture(params=grounds.params(cpu=True))
def ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on the CPU, on one GPU that its ranks share, and on one GPU a rank."""
    _on(request.param, monkeypatch)


@pytest.fixture
def on_ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test where its mark says: on several GPUs, else on one, in a world of one."""
    several = request.node.get_closest_marker("multi_gpu") is not None
    monkeypatch.setattr(grounds, "CURRENT", grounds.MULTI_GPU if several else grounds.ALONE)


@pytest.fixture(params=grounds.params())
def gpu_ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ground``, without the CPU."""
    _on(request.param, monkeypatch)


@pytest.fixture(params=grounds.params(**{name: name for name in parity.EXACT}))
def each_wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ground``; on the CPU once for each wire that averages exactly."""
    monkeypatch.setattr(parity, "WIRE", _on(request.param, monkeypatch) or "group")


@pytest.fixture(params=grounds.params(at_once=False, deferred=True))
def each_reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ground``; on the CPU twice: reduced values are read at once, and one step later."""
    monkeypatch.setattr(parity, "DEFERRED", _on(request.param, monkeypatch))


@pytest.fixture(scope="session")
def compilers() -> None:
    """What ``torch.compile`` imports when it first compiles is there before ranks are forked."""
    torch.compiler.list_backends()
    for name in (
        "torch._inductor.compile_fx",
        "sympy.combinatorics",
        "torch._dynamo.repro.after_aot",
    ):
        import_module(name)


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
    assert not torch.cuda.is_initialized(), "the test used CUDA in the process that forks ranks"
    assert not (dist.is_available() and dist.is_initialized()), "the test left a process group"
    extra = [t.name for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    assert not extra, f"the test left threads: {extra}"
    rank_zero_only.rank = rank  # type: ignore[assignment]
