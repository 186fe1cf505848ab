"""Z7, Z8: checkpoints of ``zero=1`` are ddp's: saved by 3 ranks, loaded by 1, 2, 3, by ddp, and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_dp import LeanDDPStrategy
from tests.multi_process.optim.test_step_bits import assert_same_bytes
from tests.multi_process.optim.test_zero_trainer import Net
from tests.support.trainers import ddp, fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]

MIDDLE = 2  # optimizer steps; in an epoch's midst
STEPS = 5


class Amsgrad(Net):
    """AdamW of another flavour; without a schedule, which is not what is asked here."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02, amsgrad=True, fused=True)


class Eager(Net):
    """An optimizer whose state is there before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.05)


class Whole(Net):
    """Owners of whole tensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), 0.05)


class Saves(Callback):
    """Saves after ``step`` optimizer steps, or before the first."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.step == 0:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and self.step:
            trainer.save_checkpoint(self.path)
            self.step = -1


def _fit(
    rank: int,
    world: int,
    port: int,
    make: type[Net],
    strategy: Any,
    path: Path | None = None,
    step: int = MIDDLE,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> tuple[dict[str, Tensor], pl.Trainer]:
    module = make()
    runner = fit(
        module,
        rank,
        world,
        port,
        strategy,
        lambda: [Saves(path, step)] if path is not None else [],
        str(ckpt_path) if ckpt_path is not None else None,
        **{"max_steps": STEPS, "max_epochs": -1, **kwargs},
    )
    return module.state_dict(), runner


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def _save_and_go_on(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """On 3 ranks: for each class save with and without shares, and go on from either in either."""
    found = {}
    for make in (Amsgrad, Eager, Whole):
        name = make.__name__
        plain, shared = folder / f"{name}-plain.ckpt", folder / f"{name}-zero.ckpt"
        expected, _ = _fit(rank, world, port, make, lean(), plain)
        weights, _ = _fit(rank, world, port, make, lean(zero=1), shared)
        assert_same_bytes(weights, expected, name)
        if rank == 0:
            ours, theirs = _load(shared), _load(plain)
            assert_same_bytes(ours["optimizer_states"], theirs["optimizer_states"], name)
            assert ours.keys() == theirs.keys()
            moments = ours["optimizer_states"][0]["state"].values()
            assert any(v.any() for s in moments for v in s.values() if torch.is_tensor(v))
        for path, strategy in (
            (shared, lean(zero=1)),
            (plain, lean(zero=1)),
            (shared, ddp(find_unused_parameters=True)),
        ):
            again, _ = _fit(rank, world, port, make, strategy, ckpt_path=path)
            if isinstance(strategy, LeanDDPStrategy):
                assert_same_bytes(again, expected, f"{name} resumed")
        found[name] = expected
    return found


def _go_on(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """On another number of ranks: go on from what 3 ranks saved."""
    found = {}
    for make in (Amsgrad, Eager, Whole):
        path = folder / f"{make.__name__}-zero.ckpt"
        found[make.__name__], _ = _fit(rank, world, port, make, lean(zero=1), ckpt_path=path)
    return found


def test_z7_saved_by_three_ranks_loaded_by_any_number_and_by_ddp(tmp_path):
    expected = ranks(_save_and_go_on, 3, tmp_path, timeout_s=120)[0]
    for world in (1, 2, 4):
        found = ranks(_go_on, world, tmp_path, timeout_s=120)[0]
        for name, weights in expected.items():
            for key, value in weights.items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-9, atol=1e-12)


def _windows(rank: int, world: int, port: int, folder: Path) -> None:
    """Save inside a window; go on with shares and without."""

    class Inside(Saves):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if args[-1] == 2:  # of windows of two: in the midst of the second
                trainer.save_checkpoint(self.path)

    more = {"accumulate_grad_batches": 2, "max_epochs": 2, "max_steps": -1}
    path = folder / "window.ckpt"

    def run(strategy: Any, callbacks: list[Any], ckpt_path: str | None) -> dict[str, Tensor]:
        module = Net()
        fit(module, rank, world, port, strategy, lambda: callbacks, ckpt_path, **more)
        return module.state_dict()

    expected = run(lean(zero=1), [Inside(path, 0)], None)
    for strategy in (lean(zero=1), lean()):
        again = run(strategy, [], str(path))
        for name, value in expected.items():
            torch.testing.assert_close(again[name], value, rtol=1e-12, atol=1e-12)


def _other_saves(rank: int, world: int, port: int, folder: Path) -> None:
    """Before the first step, after the fit, weights only, by ModelCheckpoint; and a second fit."""
    early, late = folder / "early.ckpt", folder / "late.ckpt"
    expected, runner = _fit(rank, world, port, Eager, lean(zero=1), early, 0)
    runner.save_checkpoint(late)
    runner.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    parts = folder / "parts.ckpt"
    _fit(rank, world, port, Eager, lean(zero={"format": "sharded"}))[1].save_checkpoint(parts)
    again, _ = _fit(rank, world, port, Eager, lean(zero=1), ckpt_path=early)
    assert_same_bytes(again, expected, "from before the first step")
    keeper = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
    module = Eager()
    more = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True}
    fit(module, rank, world, port, lean(zero=1), lambda: [keeper], **more)
    plain, _ = _fit(rank, world, port, Eager, lean())
    if rank == 0:
        states = _load(late)["optimizer_states"]
        assert all(
            state["sum"].any() and state["step"] > 0
            for number, state in states[0]["state"].items()
            if number not in (6, 7)  # the layer that nobody uses
        )
        assert "optimizer_states" not in _load(folder / "weights.ckpt")
        assert float(_load(folder / "last.ckpt")["optimizer_states"][0]["state"][0]["step"]) > 0
    straight, _ = _fit(rank, world, port, Eager, lean(zero=1), max_steps=STEPS + 2)
    assert_same_bytes(plain, expected, "without shares")
    more = {"max_steps": STEPS + 2}
    for path in (late, parts):
        more_steps, _ = _fit(rank, world, port, Eager, lean(zero=1), ckpt_path=path, **more)
        assert_same_bytes(more_steps, straight, f"from after the fit: {path.name}")


class Keeps(Net):
    """Gives the same optimizer to every fit."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = torch.optim.AdamW(self.parameters(), 0.02)
        return self.kept


def _same_optimizer(rank: int, world: int, port: int) -> None:
    found = {}
    for zero in (0, 1):
        module = Keeps()
        for options in ({"zero": zero, "bucket_cap_mb": 0.001}, {"zero": zero}, {}):
            fit(module, rank, world, port, lean(**options))
        with torch.no_grad():  # a copy of the optimizer, and a state that is put back by hand
            copy.deepcopy(module.kept)
        module.kept.load_state_dict(module.kept.state_dict())
        found[zero] = module.state_dict()
    assert_same_bytes(found[1], found[0], "after three fits")


def test_z7_the_same_optimizer_in_several_fits():
    ranks(_same_optimizer, 2)


def _rolls_back(rank: int, world: int, port: int) -> None:
    """A state that a user keeps and puts back in the midst of training, on every rank its own."""

    class Rolls(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            if args[-1] == 1:
                self.kept = copy.deepcopy(optimizer.state_dict())
            if args[-1] == 2:
                optimizer.load_state_dict(self.kept)

    found = {}
    for zero in (0, 1):
        module = Amsgrad()
        fit(module, rank, world, port, lean(zero=zero), lambda: [Rolls()], max_epochs=2)
        found[zero] = module.state_dict()
    assert_same_bytes(found[1], found[0], "rolled back")


def test_z9_a_state_put_back_by_hand():
    ranks(_rolls_back, 2)


def test_z7_z10_saved_inside_a_window(tmp_path):
    ranks(_windows, 2, tmp_path)


def test_z7_saved_before_the_first_step_and_after_the_fit(tmp_path):
    ranks(_other_saves, 2, tmp_path, timeout_s=90)
