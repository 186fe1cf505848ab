"""Stop at every step of three epochs, go on with any number of ranks: nothing twice, nothing never."""

from __future__ import annotations

import pytest

from tests.support.sampling import (
    HookLearner,
    SaveAt,
    counts_of,
    epochs_of,
    fit,
    loader,
    losses_of,
)
from tests.support.trainers import ddp, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]

EPOCHS, GLOBAL = 3, 6


def learner(n, world_size, workers=0, estimate=False, **kwargs):
    make = lambda: loader(n, GLOBAL // world_size, workers, shuffle=True, **kwargs)  # noqa: E731
    return HookLearner({"train": make}, estimate=estimate)


def _straight(rank, world_size, port, n, workers, estimate, folder, limits):
    module = learner(n, world_size, workers, estimate)
    callbacks = [SaveAt(folder, "on_train_batch_end")] if folder else []
    fit(rank, world_size, port, module, callbacks=callbacks, **limits)
    return module.seen


def _resumed(rank, world_size, port, n, workers, estimate, paths, limits):
    runs = []
    for path in paths:
        module = learner(n, world_size, workers, estimate)
        fit(rank, world_size, port, module, str(path), **limits)
        runs.append(module.seen)
    return runs


def straight(world_size, n, folder, workers=0, estimate=False, **limits):
    limits = limits or {"max_epochs": EPOCHS}
    if folder is not None:
        folder.mkdir(exist_ok=True)
    return ranks(
        _straight, world_size, n, workers, estimate, folder, limits,
    )  # fmt: skip


def resumed(world_size, n, folder, workers=0, estimate=False, every=1, **limits):
    """What each rank saw, for each checkpoint in ``folder``."""
    limits = limits or {"max_epochs": EPOCHS}
    paths = sorted(folder.iterdir())[::every]
    runs = ranks(
        _resumed, world_size, n, workers, estimate, paths, limits, timeout_s=240,
    )  # fmt: skip
    return list(zip(*runs, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_every_step_of_three_epochs(before, after, workers, tmp_path):
    """The loss curve of the resumed run is the uninterrupted one's, and so is each global batch.

    With workers and other ranks, each place in an epoch once.
    """
    n, every = 24, 3 if workers and before != after else 1
    reference = straight(before, n, tmp_path / "ckpt", workers)
    batches, losses = epochs_of(reference), losses_of(reference)
    steps = n // GLOBAL
    runs = resumed(after, n, tmp_path / "ckpt", workers, every=every)
    assert len(runs) == EPOCHS * steps // every
    for index, found in enumerate(runs):
        done = index * every + 1
        epoch, first = divmod(done, steps)
        seen = epochs_of(found)
        if done == EPOCHS * steps:
            assert seen == {}
            continue
        assert seen[epoch] == batches[epoch][first:], f"after step {done}"
        for later in range(epoch + 1, EPOCHS):
            assert seen[later] == batches[later], f"after step {done}"
        got = losses_of(found)
        assert max(abs(a - b) for a, b in zip(got, losses[done:], strict=True)) < 1e-12
        numbers = [idx for e, idx, *_ in found[0] if e == epoch]
        assert numbers == list(range(first, steps)), f"batch_idx after step {done}"


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_every_sample_of_a_cut_epoch_comes_once_when_nothing_divides(before, after, tmp_path):
    n = 23
    reference = straight(before, n, tmp_path / "ckpt")
    runs = resumed(after, n, tmp_path / "ckpt")
    at = 0
    for epoch in range(EPOCHS):
        steps = epochs_of(reference)[epoch]
        for k in range(1, len(steps) + 1):
            found = runs[at]
            at += 1
            trained = {i for step in steps[:k] for i in step}
            left = counts_of(found, epoch)
            if k < len(steps):
                assert trained | set(left) == set(range(n))
                assert sum(left.values()) - (n - len(trained)) < after
            else:
                assert not left
            for later in range(epoch + 1, EPOCHS):
                whole = counts_of(found, later)
                assert set(whole) == set(range(n))
                assert sum(whole.values()) - n < after


@pytest.mark.parametrize("workers", [0, 2])
def test_with_estimated_stepping_batches_and_a_schedule(workers, tmp_path):
    """Reading it sets the loaders up before the loops are restored."""
    n = 24
    reference = straight(2, n, tmp_path / "ckpt", workers, estimate=True)
    losses = losses_of(reference)
    every = 3 if workers else 1  # still each place in an epoch
    runs = resumed(2, n, tmp_path / "ckpt", workers, estimate=True, every=every)
    assert len(runs) == EPOCHS * n // GLOBAL // every
    for index, found in enumerate(runs):
        done, got = index * every + 1, losses_of(found)
        assert got == pytest.approx(losses[done:], abs=1e-12), f"after step {done}"


def test_the_control_ddp_replays_the_head_of_the_epoch(tmp_path):
    """The same check must fail for Lightning's own strategy, or it shows nothing."""
    batches = ranks(_ddp, 2, tmp_path, None)
    again = ranks(_ddp, 2, tmp_path, tmp_path / "001.ckpt")
    assert epochs_of(again)[0] != epochs_of(batches)[0][2:]


def _ddp(rank, world_size, port, folder, path):

    from tests.support.trainers import trainer

    module = learner(24, world_size)
    strategy = ddp()
    callbacks = [SaveAt(folder, "on_train_batch_end")] if path is None else []
    t = trainer(world_size, port, strategy, callbacks=callbacks)
    t.fit(module, ckpt_path=path)
    return module.seen
