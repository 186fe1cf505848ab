"""Z8, Z20: memory of a step, of a save in parts and of a load, with ``zero=1``."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.support.trainers import fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the host's memory")]

MIB = 2**20
BUCKET = 8 * MIB
WIDTH, LAYERS = 1024, 32  # 128 MiB of parameters in tensors of 4 MiB


def _anonymous() -> int:
    """Bytes of this process that are in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("not run: this system does not say what memory is in files")


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


def test_z8_z20_a_step_a_save_in_parts_and_a_load_stay_within_their_bounds(tmp_path):
    parameters = 4 * (LAYERS * WIDTH * WIDTH + 7 * WIDTH)
    slack = 40 * MIB  # the Trainer, messages, what the allocator keeps
    # Parameters, this rank's half of two moments, gradients, four buckets received, two gathered.
    bound = 3 * parameters + 6 * BUCKET + slack
    path = tmp_path / "a.ckpt"
    for _, step, save in ranks(_run, 2, {"format": "sharded"}, path, False, timeout_s=90):
        assert step <= bound, (step / MIB, bound / MIB)
        assert save <= bound, (save / MIB, bound / MIB)
    for all_of_it, _, _ in ranks(_run, 2, {"format": "sharded"}, path, True, timeout_s=90):
        assert all_of_it <= bound, (all_of_it / MIB, bound / MIB)
    plain = tmp_path / "b.ckpt"
    for _, step, _ in ranks(_run, 2, 0, plain, False, timeout_s=90):
        assert step > bound, "control: whole states"
    for all_of_it, _, _ in ranks(_run, 2, 1, plain, True, timeout_s=90):
        assert all_of_it <= bound, (all_of_it / MIB, bound / MIB)
