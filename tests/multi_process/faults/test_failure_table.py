"""However a rank fails, and whatever gradients travel as: all ranks end within seconds, told who and why.

Every row is a run of the Trainer on two ranks. CI runs every eleventh; the whole table with
``LEAN_DDP_WHOLE_TABLES=1 pytest tests/multi_process/faults/test_failure_table.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.kinds import WIRES, Kind
from tests.support.ranks import LIMIT_S, run_ranks
from tests.support.trainers import free_port, lean, trainer

pytestmark = pytest.mark.multi_process

FAULTS = ("backward", "forward", "killed")
LEARNT = (
    5  # batches after which buckets exist and, where reads are deferred, nothing is read at once
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: how gradients travel, and how and when rank 1 fails."""

    kind: Kind
    fault: str

    def __str__(self) -> str:
        return f"{self.kind} {self.fault}"


TABLE = [
    Row(Kind(precision, wire, deferred, False, first), fault)
    for precision, wire, deferred, first, fault in itertools.product(
        ("fp32", "bf16-true"), WIRES, (False, True), (True, False), FAULTS
    )
]
ROWS = TABLE if os.environ.get("LEAN_DDP_WHOLE_TABLES") else TABLE[::11]


class Fail(torch.autograd.Function):
    """Does nothing, or fails when gradients come back through it."""

    @staticmethod
    def forward(ctx, x, fault, note):
        ctx.fault, ctx.note = fault, note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fault:
            ctx.note()
        if ctx.fault == "backward":
            raise ValueError("boom in backward")
        if ctx.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return grad, None, None


class Net(pl.LightningModule):
    def __init__(self, row, note):
        super().__init__()
        torch.manual_seed(0)
        self.row, self.note = row, note
        self.first = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.last = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        at = 0 if self.row.kind.first_step else LEARNT
        fault = self.row.fault if batch_idx == at and self.global_rank == 1 else ""
        if fault == "forward":
            self.note()
            raise ValueError("boom in forward")
        batch = batch.to(self.first[0].weight.dtype)
        return self.last(Fail.apply(self.first(batch), fault, self.note)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _run(rank, world_size, port, row, folder):
    def note():
        (folder / "failed").write_text(str(time.time()))

    strategy = lean(**row.kind.strategy_options(), bucket_cap_mb=0.001)
    strategy._engine.host_reads_are_free = not row.kind.deferred
    t = trainer(world_size, port, strategy, max_epochs=1, **row.kind.trainer_options())
    told = {"type": None}
    try:
        t.fit(Net(row, note), DataLoader(torch.randn(64, 8), batch_size=4))
    except BaseException as error:
        told = {
            "type": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
        }
    told["at"] = time.time()
    (folder / f"{rank}").write_text(json.dumps(told))


def outcome(row: Row, folder: Path) -> dict[int, dict]:
    """Run ``row``; return what each rank was told, by rank."""
    run_ranks(_run, 2, free_port(), row, folder, init_process_group=False, expect_failure=True)
    failed = float((folder / "failed").read_text())
    told = {
        rank: json.loads(f.read_text()) for rank in range(2) if (f := folder / f"{rank}").exists()
    }
    for rank, each in told.items():
        assert each["at"] - failed < LIMIT_S, f"rank {rank} ended {each['at'] - failed:.1f} s later"
    return told


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_failure_ends_all_ranks_with_the_failing_one_named(row, tmp_path):
    told = outcome(row, tmp_path)
    assert told[0]["type"] == "RankFailedError", told[0]
    assert told[0]["rank"] == 1, told[0]
    if row.fault == "killed":
        assert 1 not in told
        return
    assert told[1]["type"] == "ValueError"
    assert f"boom in {row.fault}" in told[0]["text"], "the failing rank's own words"


def test_control_without_a_fault_nobody_fails(tmp_path):
    row = Row(Kind(), "")
    (tmp_path / "failed").write_text(str(time.time()))
    assert {each["type"] for each in outcome(row, tmp_path).values()} == {None}
