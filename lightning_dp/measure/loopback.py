"""What two ranks of this machine cost each other, over its network interface and in its shared memory.

    python -m lightning_dp.measure.loopback FOLDER RANK

Both ranks run this; rank 0 writes ``link.json`` into FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.cost import MIB
from lightning_dp.engine.plan.tuning import measure_link
from lightning_dp.engine.waiting import poll_until
from lightning_dp.engine.wires.shared_memory import SharedMemory
from lightning_dp.measure.forecast import tuples

LARGE, SMALL = 4 * MIB, 16 * 1024
REPEATS = 8
LIMIT_S = 60.0  # after which the ranks are ended


def measure_loopback() -> dict[str, Any]:
    """Start two ranks and return what they measured, as fields of a profile; empty where they could not."""
    with tempfile.TemporaryDirectory(prefix="lean-ddp-link-") as folder:
        command = [sys.executable, "-m", "lightning_dp.measure.loopback", folder]
        ranks = [
            subprocess.Popen([*command, str(rank)], stderr=subprocess.DEVNULL) for rank in range(2)
        ]
        try:
            poll_until(lambda: all(rank.poll() is not None for rank in ranks), LIMIT_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        file = Path(folder) / "link.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return {name: tuples(value) for name, value in found.items()}


def _measure(folder: str, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a core each, whatever this process was told
            os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    group = ReplicaGroup.create(torch.device("cpu"))
    link = measure_link(group)
    found = {
        "loopback": (1 / max(link.s_per_byte, 1e-12), link.latency_s / 2),
        "cpu_s_per_byte": link.busy * link.s_per_byte,
    }
    memory = SharedMemory.connect(rank, group.all_gather_object)
    if memory is not None:
        small, large = (_sum_s(memory, nbytes) for nbytes in (SMALL, LARGE))
        slope = max(1e-12, (large - small) / (LARGE - SMALL))
        found["shared"] = 1 / slope, max(1e-6, small / 2)
        memory.close()
    group.close()
    return found


def _sum_s(memory: SharedMemory, nbytes: int) -> float:
    flat = torch.zeros(nbytes // 4)
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        memory.start(flat).wait()
        best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    measured = _measure(sys.argv[1], int(sys.argv[2]))
    if sys.argv[2] == "0":
        file = Path(sys.argv[1]) / "link.json"
        file.write_text(json.dumps(measured))
