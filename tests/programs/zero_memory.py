"""Memory of a step, of a save in parts and of a load with ``zero=1``: prints bytes, as JSON.

A program of its own: what a process held before, and which of its memory is free to be used again, differs
from one test process to the next.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint  # its code takes 40 MiB, which are none of a save's memory
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_dp.engine.wires import shard
from tests.support.trainers import fit, lean, ranks

MIB = 2**20
BUCKET = 4 * MIB
WIDTH, LAYERS = 1024, 24  # 96 MiB of parameters in tensors of 4 MiB
M_MMAP_THRESHOLD = -3


def _anonymous() -> int:
    """Bytes of this process that are in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say what memory is in files")


@contextmanager
def peak() -> Generator[list[int]]:
    """The most memory while inside."""
    found, over = [_anonymous()], threading.Event()

    def look() -> None:
        while not over.is_set():
            found[0] = max(found[0], _anonymous())
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.first = nn.Linear(6, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch.float())
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


class Measures(Callback):
    """The peak of the third step, and of a save after it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.step = self.save = 0

    def on_train_batch_start(self, *args: Any) -> None:
        if args[-1] == 2:
            self._looks = peak()
            self._found = self._looks.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if args[-1] == 2:
            self._looks.__exit__(None, None, None)
            self.step = self._found[0]
            if self.path is not None:
                with peak() as found:
                    trainer.save_checkpoint(self.path)
                self.save = found[0]


def _run(rank: int, world: int, port: int, zero: Any, path: Path | None, load: bool) -> list[int]:
    # What is freed goes back to the system at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    shard.RECEIVE_BYTES = 4 * BUCKET
    begin = _anonymous()
    measures, module = Measures(None if load else path), Wide()
    options = {"bucket_cap_mb": BUCKET / MIB, "shared_memory": False, "zero": zero}
    strategy = lean(check_replicas_every_n_steps=0, **options)
    more = {"max_steps": 3, "max_epochs": -1, "limit_train_batches": 3}
    if load:
        more["max_steps"] = 4
    with peak() as found:
        ckpt_path = str(path) if load else None
        fit(module, rank, world, port, strategy, lambda: [measures], ckpt_path, **more)
    return [value - begin for value in (found[0], measures.step, measures.save)]


def main() -> None:
    folder = Path(sys.argv[1])
    sharded, plain = folder / "sharded.ckpt", folder / "plain.ckpt"
    found = {
        "sharded": ranks(_run, 2, {"format": "sharded"}, sharded, False, timeout_s=90),
        "sharded, loaded": ranks(_run, 2, {"format": "sharded"}, sharded, True, timeout_s=90),
        "whole": ranks(_run, 2, 0, plain, False, timeout_s=90),
        "plain, loaded": ranks(_run, 2, 1, plain, True, timeout_s=90),
    }
    print("MEMORY", json.dumps(found))


if __name__ == "__main__":
    main()
