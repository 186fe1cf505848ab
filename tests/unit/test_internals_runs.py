"""Each private name of Lightning and Hydra that starting and stopping needs: used, and gone."""

import signal
import types

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import launchers
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dp.faults.checkpoint_io import AtomicCheckpointIO
from lightning_dp.internals import hydra as hydra_seams
from lightning_dp.internals import loops as loop_seams
from lightning_dp.internals import runs as run_seams


@pytest.fixture
def trainer(tmp_path):
    return Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)


@pytest.fixture
def bare():
    """A trainer of a Lightning without any of the private names."""
    return types.SimpleNamespace(fit_loop=types.SimpleNamespace(), callbacks=[])


def test_launchers_are_those_that_lightning_looks_for():
    assert run_seams.ScriptLauncher is launchers._SubprocessScriptLauncher
    assert run_seams.ProcessLauncher is launchers._MultiProcessingLauncher


def test_signal_handlers_are_replaced_and_given_back(trainer, bare):
    seen = []
    undo = run_seams.replace_signal_handlers(trainer, seen.append)
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    assert seen == [signal.SIGTERM, signal.SIGUSR1]
    undo()
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    run_seams.replace_signal_handlers(bare, seen.append)()


def test_lightning_gives_back_the_users_handlers_not_ours(trainer, bare):
    remembered = trainer._signal_connector._original_handlers
    remembered[signal.SIGTERM] = "ours"
    run_seams.forget_handlers(trainer, {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR2: "x"})
    assert remembered == {signal.SIGTERM: signal.SIG_DFL}
    run_seams.forget_handlers(bare, {})


def test_the_broadcast_per_batch_is_taken_away(trainer, bare):
    loop = trainer.fit_loop.epoch_loop
    original = loop._broadcast_sigterm_tensor
    undo = loop_seams.silence_per_batch_broadcast(trainer)
    assert loop._broadcast_sigterm_tensor() is None
    undo()
    assert loop._broadcast_sigterm_tensor == original
    loop_seams.silence_per_batch_broadcast(bare)()


def test_after_each_batch(trainer, bare):
    calls = []
    trainer.fit_loop.epoch_loop._results.batch = "b"
    trainer.state.stage = None
    trainer.training = True
    trainer._logger_connector._first_loop_iter = True
    undo = loop_seams.after_each_batch(trainer, lambda: calls.append(1))
    trainer._logger_connector.on_batch_end()
    undo()
    trainer._logger_connector.on_batch_end()
    assert calls == [1]
    undo = loop_seams.after_each_batch(bare, lambda: calls.append(2))
    bare.callbacks[0].on_train_batch_end(bare, None, None, None, 0)
    bare.callbacks[0].on_validation_batch_end(bare, None, None, None, 0)
    undo()
    assert calls == [1, 2, 2]
    assert bare.callbacks == []


def test_received_sigterm(trainer, bare):
    loop_seams.set_received_sigterm(trainer)
    assert trainer.received_sigterm
    with pytest.raises(SIGTERMException):
        loop_seams.set_received_sigterm(bare)


def test_validation_is_rewound(trainer, bare):
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    before = loop_seams.validation_progress(trainer)
    progress.increment_by(3)
    loop_seams.rewind_validation(trainer, before)
    assert progress.current.ready == progress.current.started == 1
    assert progress.current.processed == progress.current.completed == 0
    assert loop_seams.validation_progress(bare) is None


def test_checkpoint_plugin(trainer):
    ours, given = AtomicCheckpointIO(), TorchCheckpointIO()
    assert run_seams.checkpoint_io(types.SimpleNamespace(_checkpoint_io=None), ours) is ours
    assert run_seams.checkpoint_io(types.SimpleNamespace(), ours) is ours
    assert run_seams.checkpoint_io(types.SimpleNamespace(_checkpoint_io=given), ours) is given
    wrapper = AsyncCheckpointIO()
    assert run_seams.checkpoint_io(types.SimpleNamespace(_checkpoint_io=wrapper), ours) is wrapper
    assert wrapper.checkpoint_io is ours
    wrapper.teardown()


def test_links_are_replaced_in_one_step(tmp_path, bare):
    link = ModelCheckpoint(tmp_path, save_last="link")
    bare.checkpoint_callbacks = [link, ModelCheckpoint(tmp_path)]
    undo = run_seams.atomic_links(bare)
    (tmp_path / "a.ckpt").touch()
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    root = types.SimpleNamespace(
        is_global_zero=True, strategy=types.SimpleNamespace(barrier=lambda name: None)
    )
    link._link_checkpoint(root, str(tmp_path / "a.ckpt"), str(tmp_path / "last.ckpt"))
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "a.ckpt"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "last.ckpt"]
    undo()
    assert "_link_checkpoint" not in vars(link)


def test_agreed_ends():
    from lightning.pytorch.utilities.exceptions import _TunerExitException

    assert run_seams.is_agreed_end(_TunerExitException())
    assert not run_seams.is_agreed_end(ValueError())


def test_timeout_and_backend_have_fallbacks():
    strategy = types.SimpleNamespace(
        process_group_backend=None, root_device=types.SimpleNamespace(type="cpu")
    )
    assert run_seams.timeout_of(strategy).total_seconds() == 1800
    assert run_seams.process_group_backend(strategy) == "gloo"


def test_slurm_requeue_needs_slurm(trainer):
    trainer.strategy.cluster_environment = None
    assert run_seams.requeue_on_slurm(trainer) is False


def test_hydra_flags_with_and_without_hydras_parser(monkeypatch):
    arguments = ["-m", "a=1", "--config-name", "x", "-cd", "d", "--config-path=p"]
    assert hydra_seams._hydra_flags(arguments) == (
        "--config-path=p",
        "--config-name=x",
        "--config-dir=d",
    )
    import hydra._internal.utils as utils

    monkeypatch.delattr(utils, "get_args_parser")
    assert hydra_seams._hydra_flags(arguments) == ("--config-path=p",)


def test_no_hydra_job_here():
    assert hydra_seams.hydra_job() is None
    assert hydra_seams.on_hydra_job_end(lambda failed: None) is False
