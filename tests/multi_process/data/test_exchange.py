"""Checkpoints go to Lightning's ddp and come from it; changed data and seeds are noticed."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_dp.errors import ConfigError
from tests.support.logs import log_lines
from tests.support.sampling import HookLearner, SaveAt, counts_of, loader
from tests.support.trainers import ddp, lean, ranks, trainer

pytestmark = pytest.mark.multi_process

N, SIZE = 24, 3


def _run(rank, world_size, port, kind, path, folder, hook, options=None, n=N, seed="0", epochs=2):
    messages = log_lines()
    module = HookLearner({"train": lambda: loader(n, SIZE, shuffle=True)})
    strategy = ddp() if kind == "ddp" else lean(**(options or {}))
    callbacks = [SaveAt(folder, hook)] if hook else []
    os.environ["PL_GLOBAL_SEED"] = seed
    t = trainer(world_size, port, strategy, max_epochs=epochs, callbacks=callbacks)
    t.fit(module, ckpt_path=path)
    return module.seen, messages


STEPS = N // (2 * SIZE)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_checkpoint_of_ddp_goes_on_where_it_was(hook, tmp_path):
    """ddp drew the same order from the same seed, so the rest of the epoch is known."""
    straight = ranks(_run, 2, "lean", None, tmp_path, None)
    ranks(_run, 2, "ddp", None, tmp_path, hook)
    for path in sorted(tmp_path.iterdir()):
        done = torch.load(path, weights_only=True)["global_step"]
        again = ranks(_run, 2, "lean", str(path), tmp_path, None)
        for (seen, _), (whole, _) in zip(again, straight, strict=True):
            assert [s[2] for s in seen] == [s[2] for s in whole[done:]]
            assert [s[3] for s in seen] == pytest.approx([s[3] for s in whole[done:]], abs=1e-12)
        if done % STEPS > 0:
            assert any("checkpoint has no data state" in m for m in again[0][1])


def test_our_checkpoint_is_accepted_by_ddp(tmp_path):
    """It ignores our key; at an epoch's end it goes on with the same losses."""
    straight = ranks(_run, 2, "lean", None, tmp_path, "on_train_epoch_end")
    again = ranks(_run, 2, "ddp", str(tmp_path / "000.ckpt"), tmp_path, None)
    for (seen, _), (whole, _) in zip(again, straight, strict=True):
        assert [s[3] for s in seen] == pytest.approx([s[3] for s in whole[STEPS:]], abs=1e-12)
    middle = tmp_path / "middle"
    ranks(_run, 2, "lean", None, middle, "on_train_batch_end")
    ranks(_run, 2, "ddp", str(middle / "001.ckpt"), tmp_path, None)  # it loads; its data replays


def test_the_state_is_plain_integers_and_strings(tmp_path):
    ranks(_run, 2, "lean", None, tmp_path, "on_train_batch_end")
    state = torch.load(tmp_path / "001.ckpt", weights_only=True)["lean_ddp"]["data"]
    assert state["loaders"][0]["consumed"] == 2 * 2 * SIZE
    assert (state["epoch"], state["batches"], state["world_size"]) == (0, 2, 2)

    def plain(value):
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return isinstance(value, (int, str))

    assert plain(state)
    end = torch.load(tmp_path / f"{STEPS - 1:03d}.ckpt", weights_only=True)["lean_ddp"]["data"]
    assert (end["epoch"], end["batches"], end["loaders"][0]["consumed"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n": 30}, "a pass had 24 units (sample) and has 30"),
        ({"seed": "5"}, "the seed was 0 and is 5"),
    ],
)
def test_changed_data_begins_the_epoch_anew(change, told, tmp_path):
    ranks(_run, 2, "lean", None, tmp_path, "on_train_batch_end")
    path = str(tmp_path / "005.ckpt")  # the second batch of the second epoch

    def changed(rank, world_size, port, options):
        return _run(rank, world_size, port, "lean", path, tmp_path, None, options, **change)

    results = ranks(changed, 2, {})
    seen = [seen for seen, _ in results]
    assert counts_of(seen, 1) == dict.fromkeys(range(change.get("n", N)), 1)
    assert not counts_of(seen, 0)
    assert any(told in m for m in results[0][1])

    def refused(rank, world_size, port):
        with pytest.raises(ConfigError, match="anew"):
            changed(rank, world_size, port, {"resume": "strict"})
        return True

    assert all(ranks(refused, 2))


def test_changed_data_does_not_matter_between_epochs(tmp_path):
    ranks(_run, 2, "lean", None, tmp_path, "on_train_epoch_end")
    path = str(tmp_path / "000.ckpt")

    def changed(rank, world_size, port):
        options = {"resume": "strict"}
        return _run(rank, world_size, port, "lean", path, tmp_path, None, options, n=30, seed="5")

    assert counts_of([seen for seen, _ in ranks(changed, 2)], 1) == dict.fromkeys(range(30), 1)


def test_another_effective_batch_is_said(tmp_path):
    ranks(_run, 2, "lean", None, tmp_path, "on_train_batch_end")
    results = ranks(_run, 3, "lean", str(tmp_path / "001.ckpt"), tmp_path, None)
    told = [m for m in results[0][1] if "an optimizer step had 6 samples (2 rank(s))" in m]
    assert len(told) == 1
    assert "now has 9 (3 rank(s))" in told[0]
    seen = counts_of([seen for seen, _ in results], 0)
    assert len(seen) == N - 2 * 2 * SIZE


def _twice(rank, world_size, port):
    """Two fits of one trainer, and a checkpoint written after the second."""
    module = HookLearner({"train": lambda: loader(N, SIZE, shuffle=True)})
    t = trainer(world_size, port, lean(), max_epochs=1)
    t.fit(module)
    t.fit_loop.max_epochs = 2
    t.fit(module)
    return module.seen


def test_a_second_fit_goes_on_in_the_next_epoch():
    seen = ranks(_twice, 2)
    straight = ranks(_run, 2, "lean", None, None, None)
    assert [[s[2] for s in each] for each in seen] == [[s[2] for s in each] for each, _ in straight]


def _after(rank, world_size, port, folder, path):
    module = HookLearner({"train": lambda: loader(N, SIZE, shuffle=True)})
    t = trainer(world_size, port, lean(), max_steps=3, max_epochs=2)
    t.fit(module)
    t.save_checkpoint(path)
    again = HookLearner({"train": lambda: loader(N, SIZE, shuffle=True)})
    trainer(world_size, port, lean(), max_epochs=2).fit(again, ckpt_path=path)
    return module.seen + again.seen


def test_a_checkpoint_written_after_fit_goes_on_too(tmp_path):
    seen = ranks(_after, 2, tmp_path, str(tmp_path / "after.ckpt"))
    straight = ranks(_run, 2, "lean", None, None, None)
    assert [[s[2] for s in each] for each in seen] == [[s[2] for s in each] for each, _ in straight]


def test_lightning_does_not_warn_that_data_cannot_be_resumed(tmp_path):
    def warned(rank, world_size, port, kind):
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _run(rank, world_size, port, kind, str(tmp_path / "001.ckpt"), tmp_path, None)
        return any("is not resumable" in str(each.message) for each in caught)

    ranks(_run, 2, "lean", None, tmp_path, "on_train_batch_end")
    assert not any(ranks(warned, 2, "lean"))
    assert ranks(warned, 2, "ddp")[0], "the control"
