"""Checkpoints from any hook resume alike: by epochs or by steps, with and without validation."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_dp.errors import RankFailedError
from tests.support.sampling import (
    HookLearner,
    SaveAt,
    ValHookLearner,
    counts_of,
    epochs_of,
    fit,
    loader,
    losses_of,
)
from tests.support.trainers import ranks

pytestmark = pytest.mark.multi_process

N, SIZE, RANKS, EPOCHS = 24, 3, 2, 3
STEPS = N // (SIZE * RANKS)


def learner(validate):
    loaders = {
        "train": lambda: loader(N, SIZE, shuffle=True),
        "val": lambda: loader(5, 2),
    }
    return (ValHookLearner if validate else HookLearner)(loaders)


def _run(rank, world_size, port, validate, folder, hook, paths, limits):
    if hook is not None:
        module = learner(validate)
        fit(rank, world_size, port, module, callbacks=[SaveAt(folder, hook)], **limits)
        return module.seen
    runs = []
    for path in paths:
        module = learner(validate)
        fit(rank, world_size, port, module, path, **limits)
        runs.append(module.seen)
    return runs


def run(validate, folder, hook, paths, limits, world_size=RANKS):
    return ranks(
        _run, world_size, validate, folder, hook, paths, limits, timeout_s=120,
    )  # fmt: skip


LIMITS = {
    "epochs": {"max_epochs": EPOCHS},
    "steps": {"max_steps": EPOCHS * STEPS, "max_epochs": -1},
    "half_epochs_validated": {"max_epochs": EPOCHS, "val_check_interval": 0.5},
    "limited": {"max_epochs": EPOCHS, "limit_train_batches": 3},
}
HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("validate", [False, True])
def test_a_checkpoint_of_any_hook_goes_on_where_it_was(hook, limits, validate, tmp_path):
    if not validate and ("valid" in hook or "valid" in limits):
        return  # nothing of that name happens
    kwargs = LIMITS[limits]
    reference = run(validate, tmp_path, hook, None, kwargs)
    losses, order = losses_of(reference), [(e, i) for e, i, *_ in reference[0]]
    paths = sorted(tmp_path.iterdir())
    assert paths
    runs = zip(*run(validate, None, None, paths, kwargs), strict=True)
    for path, found in zip(paths, runs, strict=True):
        done = torch.load(path, weights_only=True)["global_step"]
        for seen, whole in zip(found, reference, strict=True):
            assert [s[2] for s in seen] == [s[2] for s in whole[done:]], path.name
        assert losses_of(found) == pytest.approx(losses[done:], abs=1e-12), path.name
        assert [(e, i) for e, i, *_ in found[0]] == order[done:], path.name


class Breaks(HookLearner):
    def __init__(self, loaders, step):
        super().__init__(loaders)
        self.step = step

    def training_step(self, batch, batch_idx):
        if self.global_step == self.step:
            raise KeyError("on purpose")
        return super().training_step(batch, batch_idx)


def _breaks(rank, world_size, port, folder):
    straight = HookLearner({"train": lambda: loader(N, SIZE, shuffle=True)})
    fit(rank, world_size, port, straight, **LIMITS["epochs"])
    runs = []
    for step in range(EPOCHS * STEPS):
        broken = Breaks({"train": lambda: loader(N, SIZE, shuffle=True)}, step)
        save = SaveAt(folder / str(step), "on_exception")
        # Its own error, or the other rank's, which was a moment earlier.
        with pytest.raises((KeyError, RankFailedError)):
            fit(rank, world_size, port, broken, callbacks=[save], **LIMITS["epochs"])
        again = learner(False)
        fit(rank, world_size, port, again, str(folder / str(step) / "000.ckpt"), **LIMITS["epochs"])
        runs.append((broken.seen, again.seen))
    return straight.seen, runs


def test_a_checkpoint_of_an_exception_goes_on_where_it_was(tmp_path):
    for straight, runs in ranks(_breaks, RANKS, tmp_path, timeout_s=120):
        for step, (broken, again) in enumerate(runs):
            assert len(broken) == step
            assert [s[2] for s in broken + again] == [s[2] for s in straight]


def _reloads(rank, world_size, port, folder, path, every):
    calls = []

    class Counts(HookLearner):
        def train_dataloader(self):
            calls.append(self.current_epoch)
            return super().train_dataloader()

    module = Counts({"train": lambda: loader(N, SIZE, shuffle=True)})
    fit(rank, world_size, port, module, path, max_epochs=6,
        reload_dataloaders_every_n_epochs=every,
        callbacks=[SaveAt(folder, "on_train_batch_end")] if path is None else [])  # fmt: skip
    return module.seen, calls


@pytest.mark.parametrize("every", [1, 2])
def test_loaders_made_anew_keep_order_and_phase(every, tmp_path):
    straight = ranks(_reloads, RANKS, tmp_path, None, every)
    reference = [seen for seen, _ in straight]
    assert straight[0][1] == list(range(0, 6, every))
    for done in (2, 5, 9, 13):
        path = str(tmp_path / f"{done - 1:03d}.ckpt")
        again = ranks(_reloads, RANKS, tmp_path, path, every)
        for (seen, calls), whole in zip(again, reference, strict=True):
            assert [s[2] for s in seen] == [s[2] for s in whole[done:]]
            epoch = done // STEPS
            later = [e for e in range(0, 6, every) if e > epoch]
            assert calls[1:] == later, f"after step {done}"
    whole = epochs_of(reference)
    assert all(sorted(i for s in whole[e] for i in s) == list(range(N)) for e in range(6))
    assert whole[0] != whole[1]


def _accumulates(rank, world_size, port, folder, path, accumulate, size, mid_window):
    module = HookLearner({"train": lambda: loader(N, size, shuffle=True)})
    callbacks = [SaveAt(folder, "on_train_batch_end")] if path is None else []
    fit(rank, world_size, port, module, path, options={"mid_window": mid_window}, max_epochs=2,
        callbacks=callbacks, accumulate_grad_batches=accumulate)  # fmt: skip
    return module.seen, module.net.weight.tolist()


def accumulates(world_size, folder, path, accumulate, size, mid_window="save"):
    return ranks(
        _accumulates, world_size, folder, path, accumulate, size, mid_window,
    )  # fmt: skip


@pytest.mark.parametrize("after", [1, 2, 3])
def test_the_same_global_batches_with_another_world_and_accumulation(after, tmp_path):
    """2 ranks x 3 x 2 goes on as 1 x 6 x 2, 2 x 2 x 3 or 3 x 2 x 2: steps see the same samples."""
    straight = accumulates(2, tmp_path, None, 2, 3)
    size, accumulate = {1: (6, 2), 2: (2, 3), 3: (2, 2)}[after]
    for step in range(1, 4):  # after whole windows
        path = str(tmp_path / f"{step * 2 - 1:03d}.ckpt")
        again = accumulates(after, tmp_path, path, accumulate, size)
        got, want = again[0][1], straight[0][1]
        assert torch.allclose(torch.tensor(got), torch.tensor(want), rtol=0, atol=1e-12)
        trained = counts_of([seen[: step * 2] for seen, _ in straight], 1)
        assert counts_of([seen for seen, _ in again], 1) + trained == dict.fromkeys(range(N), 1)


def test_inside_a_window_it_goes_on_at_the_micro_batch(tmp_path):
    """The partial gradients are in the checkpoint, so the data must not go back."""
    straight = accumulates(2, tmp_path, None, 2, 3)
    for done in (1, 3, 5):
        again = accumulates(2, tmp_path, str(tmp_path / f"{done - 1:03d}.ckpt"), 2, 3)
        for (seen, weight), (whole, want) in zip(again, straight, strict=True):
            assert [s[2] for s in seen] == [s[2] for s in whole[done:]]
            assert torch.allclose(torch.tensor(weight), torch.tensor(want), rtol=0, atol=1e-12)


def test_without_partial_gradients_it_goes_back_to_the_last_step(tmp_path):
    straight = accumulates(2, tmp_path, None, 2, 3)
    path = tmp_path / "002.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["lean_ddp"]["data"]["batches"] == 3
    window = saved["lean_ddp"].pop("window")
    assert window
    # as it would have been written without the window: one batch of each rank less
    data = saved["lean_ddp"]["data"]
    data["batches"] -= 1
    data["loaders"][0]["consumed"] -= SIZE * RANKS
    torch.save(saved, path)
    again = accumulates(2, tmp_path, str(path), 2, 3)
    for (seen, weight), (whole, want) in zip(again, straight, strict=True):
        assert [s[2] for s in seen] == [s[2] for s in whole[2:]]
        assert torch.allclose(torch.tensor(weight), torch.tensor(want), rtol=0, atol=1e-12)


class _Dies(pl.Callback):
    """Raise after so many batches, in the hook that comes after a batch or inside the next one."""

    def __init__(self, batches, hook):
        self.batches = batches
        setattr(self, hook, self._look)

    def _look(self, trainer, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches:
            raise KeyError("on purpose")


def _dies(rank, world_size, port, folder, batches, hook, accumulate, path):
    module = HookLearner({"train": lambda: loader(N, SIZE, shuffle=True)})
    with pytest.raises(KeyError):
        fit(rank, world_size, port, module, path, max_epochs=2, accumulate_grad_batches=accumulate,
            callbacks=[_Dies(batches, hook), SaveAt(folder, "on_exception")])  # fmt: skip
    return module.seen


@pytest.mark.parametrize(
    ("batches", "hook", "back"),
    [
        (3, "on_train_batch_end", 2),
        (3, "on_before_backward", 2),
        (3, "on_before_optimizer_step", 2),
        (4, "on_train_batch_end", 0),  # the epoch is over
        (5, "on_before_backward", 0),
        (6, "on_train_batch_end", 2),
    ],
)
def test_an_exception_inside_a_window_repeats_its_samples_and_loses_none(
    batches, hook, back, tmp_path
):
    straight = accumulates(2, tmp_path / "whole", None, 2, 3)
    ranks(_dies, RANKS, tmp_path, batches, hook, 2, None)
    saved = torch.load(tmp_path / "000.ckpt", weights_only=True)["lean_ddp"]
    assert "window" not in saved, "an exception may be on one rank: nothing is exchanged"
    assert saved["data"]["batches"] == back
    first = saved["data"]["epoch"] * STEPS + back
    again = accumulates(2, tmp_path, str(tmp_path / "000.ckpt"), 2, 3)
    for (seen, weight), (whole, want) in zip(again, straight, strict=True):
        assert [s[2] for s in seen] == [s[2] for s in whole[first:]]
        assert torch.allclose(torch.tensor(weight), torch.tensor(want), rtol=0, atol=1e-12)


def test_windows_that_begin_in_the_middle_are_gone_back_over_too(tmp_path):
    """2 x 2 batches of windows of 2, gone on with windows of 3: their steps are at 2+3, 2+6."""
    accumulates(2, tmp_path, None, 2, 3)
    path, then = str(tmp_path / "001.ckpt"), tmp_path / "then"
    ranks(_dies, RANKS, then, 3, "on_train_batch_end", 3, path)
    saved = torch.load(then / "000.ckpt", weights_only=True)["lean_ddp"]
    assert saved["data"]["batches"] == 2, "one micro-batch waits for its step"


CHANGED = [("on_train_batch_end", 3), ("on_validation_end", 1), ("on_train_epoch_end", 3)]


def _saves(rank, world_size, port, folder, limits):
    module = learner(True)
    saves = [SaveAt(folder / hook, hook) for hook, _ in CHANGED]
    fit(rank, world_size, port, module, callbacks=saves, **limits)
    return module.seen


def _resumes(rank, world_size, port, paths, limits):
    runs = []
    for path in paths:
        module = learner(True)
        fit(rank, world_size, port, module, str(path), **limits)
        runs.append(module.seen)
    return runs


@pytest.mark.parametrize("limits", LIMITS)
def test_another_number_of_ranks_with_validation_and_limits(limits, tmp_path):
    """Other ranks, the same batch size: other steps, but no sample twice, and none never."""
    kwargs = LIMITS[limits]
    if limits == "steps":  # three epochs of the ranks that go on
        kwargs = {"max_steps": 100, "max_epochs": EPOCHS}
    straight = ranks(_saves, RANKS, tmp_path, kwargs)
    for after in (1, 3):
        hooks = [hook for hook, then in CHANGED if then == after]
        paths = [
            path
            for hook in hooks
            for path in sorted((tmp_path / hook).iterdir())[:: 1 if after == 1 else 2]
        ]
        assert {path.parent.name for path in paths} == set(hooks)
        runs = zip(*ranks(_resumes, after, paths, kwargs, timeout_s=120), strict=True)
        for path, found in zip(paths, runs, strict=True):
            _no_sample_twice(path, straight, found, after, limits)


def _no_sample_twice(path, straight, found, after, limits):
    saved = torch.load(path, weights_only=True)
    data, done = saved["lean_ddp"]["data"], saved["global_step"]
    assert len({len(seen) for seen in found}) == 1, path
    for epoch in range(EPOCHS):
        counts = counts_of(found, epoch)
        counts += counts_of([seen[:done] for seen in straight], epoch)
        assert max(counts.values()) == 1, (path, after, epoch)
        if limits != "limited":
            assert len(counts) == N, (path, after, epoch)
        elif epoch > data["epoch"]:
            assert len(counts) == min(N, 3 * SIZE * after), (path, after, epoch)
