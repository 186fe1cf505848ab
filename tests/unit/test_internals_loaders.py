"""Each private name of Lightning that the data plane uses is there; and what happens where it is not."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_dp.internals import loaders as loader_seams
from lightning_dp.internals.loaders import LoopProgress


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return self.w.sum() * batch.float().mean()

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def make_trainer(**kwargs):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return pl.Trainer(**{**quiet, "max_epochs": 1, **kwargs})


@pytest.fixture(scope="module")
def fitted():
    trainer = make_trainer()
    trainer.fit(Module(), DataLoader(range(6), batch_size=2))
    return trainer


def test_the_users_flag():
    assert loader_seams.user_wants_sharding(make_trainer())
    assert not loader_seams.user_wants_sharding(make_trainer(use_distributed_sampler=False))
    assert loader_seams.user_wants_sharding(SimpleNamespace())  # the fallback


def test_loaders_are_taken_over_and_given_back():
    trainer = make_trainer()
    connector = trainer._data_connector
    loader = DataLoader(range(4))
    give_back = loader_seams.take_over_loaders(trainer)
    assert connector._prepare_dataloader(loader, shuffle=True, mode=None) is loader
    give_back()
    assert "_prepare_dataloader" not in vars(connector)


def test_without_the_method_the_flag_is_used_and_without_both_nothing():
    flag = SimpleNamespace(use_distributed_sampler=True)
    trainer = SimpleNamespace(_accelerator_connector=flag)
    give_back = loader_seams.take_over_loaders(trainer)
    assert flag.use_distributed_sampler is False
    give_back()
    assert flag.use_distributed_sampler is True
    assert loader_seams.take_over_loaders(SimpleNamespace()) is None


def test_indices_are_recorded(monkeypatch):
    record = loader_seams.index_recorder()
    recorder = record(BatchSampler(range(5), 2, False))
    assert list(recorder) == [[0, 1], [2, 3], [4]]
    assert recorder.seen_batch_indices == [[0, 1], [2, 3], [4]]
    from lightning.pytorch.overrides import distributed

    monkeypatch.delattr(distributed, "_IndexBatchSamplerWrapper")
    assert loader_seams.index_recorder() is None


def test_lightning_announces_loaders_by_a_barrier():
    names = []

    class Notes(pl.strategies.SingleDeviceStrategy):
        def barrier(self, *args, **kwargs):
            names.extend(args)

    trainer = make_trainer(strategy=Notes(device=torch.device("cpu")), accelerator="auto")
    trainer.fit(Module(), DataLoader(range(4)))
    trainer.predict(Module(), DataLoader(range(4)))
    told = [name for name in names if loader_seams.is_new_set_of_loaders(name)]
    assert told == ["train_dataloader()", "predict_dataloader()"]
    assert not loader_seams.is_new_set_of_loaders(None)
    assert not loader_seams.is_new_set_of_loaders("Trainer.save_checkpoint")


def test_counters(fitted):
    assert loader_seams.loop_progress(fitted) == LoopProgress(
        epoch=1, begun=3, done=3, is_last=True
    )
    assert loader_seams.loop_progress(SimpleNamespace(current_epoch=4)) == LoopProgress(epoch=4)
    assert loader_seams.reload_epoch(fitted) == 0
    assert loader_seams.combination_mode(fitted) == "max_size_cycle"
    empty = SimpleNamespace(fit_loop=SimpleNamespace())
    assert loader_seams.reload_epoch(empty) == -1
    assert loader_seams.combination_mode(empty) == "max_size_cycle"
    loader_seams.set_reload_epoch(empty, 3)
    assert vars(empty.fit_loop) == {}
    loader_seams.set_reload_epoch(fitted, 0)
    assert fitted.fit_loop._last_train_dl_reload_epoch == 0


@pytest.mark.parametrize(
    ("progress", "over"),
    [
        (LoopProgress(0, 3, 3, True), True),
        (LoopProgress(0, 3, 3, False), False),
        (LoopProgress(0, 3, 2, True), False),  # the last batch is under way
        (LoopProgress(0, 0, 0, True), False),
    ],
)
def test_when_an_epoch_is_over(progress, over):
    assert progress.is_over() is over
    assert LoopProgress(0, 3, 3, False).is_over(3)


def test_a_checkpoint_holds_the_counters_and_loader_states(fitted, tmp_path):
    fitted.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert loader_seams.saved_progress(checkpoint) == LoopProgress(1, 3, 3, True)
    assert loader_seams.take_loader_states(checkpoint) == []
    loader_seams.put_loader_states(checkpoint, [{"at": 1}, {"at": 2}])
    inside = checkpoint["loops"]["fit_loop"]["state_dict"]
    assert inside["combined_loader"] == [{"at": 1}, {"at": 2}]
    assert loader_seams.take_loader_states(checkpoint) == [{"at": 1}, {"at": 2}]
    assert "combined_loader" not in inside
    for broken in ({}, {"loops": {}}, {"loops": {"fit_loop": {}}}):
        assert loader_seams.saved_progress(broken) is None
        before = copy.deepcopy(broken)
        assert loader_seams.take_loader_states(broken) == []
        loader_seams.put_loader_states(broken, [1])
        assert broken == before


def test_lightning_looks_for_loader_states_in_that_place():
    class Stateful:
        loaded = None

        def __iter__(self):
            return iter(torch.arange(4).split(1))

        def __len__(self):
            return 4

        def state_dict(self):
            return {"at": 7}

        def load_state_dict(self, state):
            type(self).loaded = state

    trainer = make_trainer(max_steps=2, max_epochs=-1)
    trainer.fit(Module(), Stateful())
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    assert loader_seams.take_loader_states(checkpoint) == [{"at": 7}]


def test_loops_are_placed(fitted):
    trainer = make_trainer(max_epochs=9)
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

    def counters(progress):
        return [
            (at.ready, at.started, at.processed, at.completed)
            for at in (progress.current, progress.total)
        ]

    loop.batch_progress.total.ready = loop.batch_progress.total.started = 10
    loop.batch_progress.total.processed = loop.batch_progress.total.completed = 10
    fit.epoch_progress.increment_ready()
    fit.epoch_progress.increment_started()
    assert loader_seams.restore_fit_loop(trainer, 0, 4, 6)  # in the middle
    assert counters(fit.epoch_progress)[0] == (1, 1, 0, 0)
    assert counters(loop.batch_progress) == [(4,) * 4, (14,) * 4]
    assert fit.restarting
    assert fit.restarted_mid_epoch
    assert loader_seams.restore_fit_loop(trainer, 1, 0, 6)  # epoch 0 must still be ended
    assert counters(loop.batch_progress) == [(6,) * 4, (16,) * 4]
    fit.epoch_progress.increment_processed()
    assert loader_seams.restore_fit_loop(trainer, 1, 0, 6)  # an epoch begins
    assert counters(fit.epoch_progress)[0] == (1,) * 4
    assert counters(loop.batch_progress)[0] == (0,) * 4
    assert not fit.restarting
    assert not loop.restarting
    assert not loader_seams.restore_fit_loop(SimpleNamespace(fit_loop=SimpleNamespace()), 0, 0, 6)


def test_predictions_are_changed_in_place():
    trainer = make_trainer()
    seen = {}

    class Changes(pl.Callback):
        def on_predict_end(self, trainer, module):
            lists = loader_seams.predictions(trainer)
            seen["lists"] = [list(own) for own in lists]
            lists[0][:] = ["merged"]

    trainer.callbacks.append(Changes())
    assert trainer.predict(Module(), DataLoader(range(2))) == ["merged"]
    assert len(seen["lists"][0]) == 2
    assert loader_seams.predictions(SimpleNamespace(predict_loop=SimpleNamespace())) is None
