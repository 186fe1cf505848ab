"""Z7, Z19, Z23: checkpoints of ``zero=1`` in both formats go on anywhere, or name what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import DataLoader

from lightning_dp.errors import CheckpointError, ConfigError
from lightning_dp.faults import checkpoint_io
from lightning_dp.step.zero_parts import read_parts
from tests.multi_process.optim.test_step_bits import assert_same_bytes
from tests.multi_process.optim.test_zero_trainer import Net, Tensors
from tests.support.trainers import Rows, ddp, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]

FORMATS = ("plain", "sharded")


class Same(Rows):
    """All rows are the same: ``ddp`` shuffles, and begins an epoch's data anew in mid-epoch."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(0)


class Eager(Net):
    """A state that is there before the first step; frozen and unused parameters; channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 5, 1).double().to(memory_format=torch.channels_last)
        self.body[0].bias.requires_grad_(False)

    def loss(self, x: Tensor, use: bool = False) -> Tensor:
        return super().loss(x, use) + self.conv(x.view(-1, 2, 3, 1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.05)


class Steady(Net):
    """Every batch trains the same layers: ``ddp`` averages what the last one of a window trains."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, True)


class Records(Callback):
    """Keeps the mean loss of every batch; saves after ``batch``, which counts from 1 over all epochs."""

    def __init__(self, path: Path | None = None, batch: int = 0) -> None:
        self.path, self.batch = path, batch
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach() * trainer.accumulate_grad_batches)
        self.losses.append(float(loss))
        if len(self.losses) == self.batch:
            trainer.save_checkpoint(self.path)


def run(
    rank: int,
    world: int,
    port: int,
    make: type[Net],
    strategy: Any,
    records: Records,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Three epochs of four batches, in windows of two."""
    module = make()
    runner = trainer(
        world,
        port,
        strategy,
        callbacks=[records, *kwargs.pop("callbacks", [])],
        **{"max_epochs": 3, "accumulate_grad_batches": 2, **kwargs},
    )
    data = Same() if make is Steady else Rows()
    loader = DataLoader(data, batch_size=12 // world, shuffle=False)
    runner.fit(module, loader, ckpt_path=str(ckpt_path) if ckpt_path is not None else None)
    return records.losses, module.state_dict()


def zero(form: str) -> Any:
    return lean(zero={"format": form}, check_replicas_every_n_steps=1)


PLACES = {"mid-epoch": 6, "mid-window": 7}
SAVED: dict[type[Net], tuple[str, ...]] = {
    Steady: ("mid-epoch",),
    Eager: ("mid-epoch", "mid-window"),
    Tensors: ("mid-window",),
}


def _save(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """On 3 ranks: what the uninterrupted run does, and files from its midst in both formats."""
    found = {}
    for make, places in SAVED.items():
        expected = run(rank, world, port, make, lean(), Records())
        for place in places:
            for form in FORMATS[: 1 if make is Steady else 2]:
                path = folder / f"{make.__name__}-{place}-{form}.ckpt"
                losses, weights = run(
                    rank, world, port, make, zero(form), Records(path, PLACES[place])
                )
                assert losses == expected[0], path
                assert_same_bytes(weights, expected[1], path.name)
        found[make.__name__] = expected
    return found


def _go_on(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """From every file, in either format, without shares, and in ``ddp`` from what it can read."""
    found = {}
    for make, places in SAVED.items():
        for place in places:
            for form in FORMATS[: 1 if make is Steady else 2]:
                path = folder / f"{make.__name__}-{place}-{form}.ckpt"
                ways: list[Any] = [zero(FORMATS[form == "plain"])]
                ways += [zero(form), lean()] if make is Eager and world == 1 else []
                if make is Steady:  # of windows ddp keeps nothing
                    ways.append(ddp(find_unused_parameters=True))
                for number, strategy in enumerate(ways):
                    key = f"{make.__name__} {place} {form} {number}"
                    found[key] = run(rank, world, port, make, strategy, Records(), path)
    return found


def test_z7_z23_saved_by_three_ranks_goes_on_in_any_number_and_in_ddp(tmp_path):
    expected = ranks(_save, 3, tmp_path, timeout_s=120)[0]
    for world in (1, 2, 4):
        for where, (losses, weights) in ranks(_go_on, world, tmp_path, timeout_s=120)[0].items():
            name, place = where.split()[:2]
            curve, final = expected[name]
            assert losses == pytest.approx(curve[PLACES[place] :], rel=1e-12, abs=1e-12), where
            for key, value in final.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-11, atol=1e-12, msg=where)


# What goes wrong


def _second_save(rank: int, world: int, port: int, path: Path, place: str) -> None:
    """Save to ``path`` after two batches, and again after four: then a rank is killed."""

    class Arms(Records):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if len(self.losses) == 3:
                self.batch = 4
                _arm(rank, place)
            super().on_train_batch_end(trainer, *args)

    run(rank, world, port, Net, zero("sharded"), Arms(path, 2))


PLACES_TO_DIE: dict[str, tuple[Any, str, int]] = {
    "writing its part": (FileSystemWriter, "write_data", 1),
    "before the index": (FileSystemWriter, "finish", 0),
    "before the file": (os, "replace", 0),
    "after the file": (checkpoint_io, "_remove_parts", 0),
}


def _arm(rank: int, place: str) -> None:
    owner, name, who = PLACES_TO_DIE[place]
    if rank == who:
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def _left(rank: int, world: int, port: int, path: Path) -> int:
    """How many of the twelve batches are still to come after what ``path`` has; then save anew."""
    records = Records(path, 1)
    run(rank, world, port, Net, zero("sharded"), records, path)
    return len(records.losses)


def test_z19_killed_at_any_moment_of_a_save_the_old_or_the_new_one_loads(tmp_path):
    for number, place in enumerate(PLACES_TO_DIE):
        path = tmp_path / str(number) / "last.ckpt"
        begin = time.monotonic()
        ranks(_second_save, 2, path, place, expect_failure=True)
        assert time.monotonic() - begin < 40, place
        left = ranks(_left, 2, path)[0]
        assert left == (8 if place == "after the file" else 10), place
        parts = path.with_name("last.ckpt.parts")
        assert sorted(path.parent.iterdir()) == [path, parts]
        assert len(list(parts.iterdir())) == 1, "what was left is swept by the next save"


def _saved(rank: int, world: int, port: int, folder: Path) -> None:
    """A file to break; besides: ModelCheckpoint, formats in turn at one place, and what is refused."""
    run(rank, world, port, Net, zero("sharded"), Records(folder / "a.ckpt", 6))
    keeper = ModelCheckpoint(
        folder / "kept",
        save_last="link",
        every_n_train_steps=1,
        save_top_k=1,
        monitor="step",
        mode="max",
    )
    more = {"callbacks": [keeper], "enable_checkpointing": True}
    run(rank, world, port, Net, zero("sharded"), Records(), **more)
    losses, _ = run(
        rank, world, port, Net, zero("sharded"), Records(), folder / "kept" / "last.ckpt"
    )
    assert losses == []  # of the last step
    for form in ("plain", "sharded", "plain"):
        run(rank, world, port, Net, zero(form), Records(folder / "turns.ckpt", 2))
    with pytest.raises(ConfigError, match=r"a Own was given\. Drop one"):
        run(rank, world, port, Net, zero("sharded"), Records(), plugins=[Own()])
    with pytest.raises(ConfigError, match="cannot write to memory://x"):
        run(rank, world, port, Net, zero("sharded"), Records("memory://x", 2))


class Own(TorchCheckpointIO):
    pass


def test_z23_a_damaged_part_is_named_and_what_is_not_needed_is_removed(tmp_path):
    ranks(_saved, 2, tmp_path)
    assert not (tmp_path / "turns.ckpt.parts").exists()
    kept = [path.name for path in (tmp_path / "kept").iterdir() if path.name.endswith(".parts")]
    assert len(kept) == 1
    path = tmp_path / "a.ckpt"
    (parts,) = (tmp_path / "a.ckpt.parts").iterdir()
    names = sorted(file.name for file in parts.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]

    def named_by(rank: int) -> str:
        checkpoint = torch.load(path)
        assert "optimizer_states" not in checkpoint  # ddp says that there is none
        try:
            read_parts(checkpoint, path, rank, 2, weights_only=True)
        except CheckpointError as error:
            return str(error)
        return ""

    for number, name in enumerate(names):
        file = parts / name
        kept_bytes = file.read_bytes()
        half = len(kept_bytes) // 2
        for broken in (
            kept_bytes[:half],
            kept_bytes[:half] + bytes([kept_bytes[half] ^ 1]) + kept_bytes[half + 1 :],
        ):
            file.write_bytes(broken)
            told = [named_by(rank) for rank in (0, 1)]
            checks = {0: (0, 1), 1: (0,), 2: (1,)}[
                number
            ]  # every rank some; what it needs, it reads
            assert all(str(file) in told[rank] for rank in checks), told
        file.unlink()
        assert any(f"{name} is missing" in named_by(rank) for rank in (0, 1))
        assert all("parts" in named_by(rank) for rank in (0, 1))
        file.write_bytes(kept_bytes)
    assert named_by(0) == named_by(1) == ""
    shutil.move(path, tmp_path / "elsewhere.ckpt")
    path = tmp_path / "elsewhere.ckpt"
    assert named_by(0) == ""  # in the same folder
    path = Path(shutil.move(path, tmp_path / "kept" / "a.ckpt"))
    assert "move both together" in named_by(0)
