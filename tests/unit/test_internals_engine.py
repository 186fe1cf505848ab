"""Private names that the engine's side touches: each with the name there, and gone."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm

from lightning_dp import LeanDDPStrategy
from lightning_dp.internals import autograd as autograd_seams
from lightning_dp.internals import gradients as gradient_seams
from lightning_dp.internals import reads
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.optimizers import run_first_after_step
from lightning_dp.step.layer_sync import CPULayerSync


class Own(LayerSync):
    """A user's plugin."""

    def apply(self, model):
        return model

    def revert(self, model):
        return model


def test_layer_sync_is_replaced_only_where_lightning_put_its_own():
    strategy = LeanDDPStrategy()
    assert hasattr(strategy, "_layer_sync"), "Lightning's name"
    ours, own = CPULayerSync(), Own()
    for before, after in ((None, None), (own, own), (TorchSyncBatchNorm(), ours)):
        strategy._layer_sync = before
        trainer_seams.replace_layer_sync(strategy, ours)
        assert strategy._layer_sync is after
    bare = SimpleNamespace()
    trainer_seams.replace_layer_sync(bare, ours)
    assert not hasattr(bare, "_layer_sync")


def test_weight_averaging_is_recognised():
    def trainer(*given):
        return SimpleNamespace(callbacks=list(given))

    swa = callbacks.StochasticWeightAveraging(swa_lrs=0.1)
    assert trainer_seams.averages_weights(trainer(swa))
    assert trainer_seams.averages_weights(trainer(callbacks.EMAWeightAveraging()))
    assert not trainer_seams.averages_weights(trainer(callbacks.ModelSummary()))
    assert not trainer_seams.averages_weights(SimpleNamespace())


def test_a_context_is_around_each_validation_of_a_fit():
    steps: list[str] = []

    @contextlib.contextmanager
    def context():
        steps.append("in")
        yield
        steps.append("out")

    class Loop:
        def run(self):
            steps.append("run")
            return "found"

    loop = Loop()
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop)))
    undo = trainer_seams.around_validation(trainer, context)
    assert loop.run() == "found"
    assert steps == ["in", "run", "out"]
    undo()
    assert "run" not in vars(loop)
    trainer_seams.around_validation(SimpleNamespace(fit_loop=SimpleNamespace()), context)()


def test_the_last_step_is_known_by_its_number_or_by_its_batch():
    def ends(step, last, automatic=True, **limits):
        return trainer_seams.ends_with_step(
            SimpleNamespace(
                global_step=step,
                is_last_batch=last,
                current_epoch=2,
                lightning_module=SimpleNamespace(automatic_optimization=automatic),
                **{"max_steps": -1, "max_epochs": None, **limits},
            )
        )

    assert ends(9, False, max_steps=10)  # counted after the strategy made it
    assert ends(10, False, automatic=False, max_steps=10)
    assert not ends(8, True, max_steps=10)
    assert ends(3, True, max_epochs=3)
    assert not ends(3, False, max_epochs=3)
    assert not ends(3, True, max_epochs=4)
    assert not ends(3, True)


def test_unwinding_is_the_status_or_an_exception():
    running = SimpleNamespace(state=SimpleNamespace(status="running"))
    assert not trainer_seams.is_unwinding(running)
    assert trainer_seams.is_unwinding(SimpleNamespace(state=SimpleNamespace(status="interrupted")))
    assert not trainer_seams.is_unwinding(None)
    try:
        raise ValueError("x")
    except ValueError:
        assert trainer_seams.is_unwinding(running)


def test_attached_trainer_of_a_module_without_one():
    assert trainer_seams.attached_trainer(torch.nn.Linear(1, 1)) is None


def test_end_of_backward(monkeypatch):
    assert autograd_seams.has_end_of_backward()
    assert not autograd_seams.queue_end_of_backward(lambda: None), "outside of a backward"
    ran = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(
        lambda _: ran.append(autograd_seams.queue_end_of_backward(lambda: ran.append("end")))
    )
    (x * 2).sum().backward()
    assert ran == [True, "end"]
    assert autograd_seams.enclosing_node() is None
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    assert autograd_seams.enclosing_node() is None
    assert autograd_seams._one_task() == 0, "in place of the graph task's number"
    assert not autograd_seams.has_end_of_backward()
    assert not autograd_seams.queue_end_of_backward(lambda: None)
    assert not autograd_seams.run_at_end_of_outer(object(), lambda: None)


@pytest.mark.parametrize("missing", ["_Options", "create_device", "create_default_device"])
def test_without_gloos_options_torchs_own_gloo_is_used(monkeypatch, missing):
    assert autograd_seams.wide_gloo() == autograd_seams.WIDE_GLOO
    names = {"_Options", "create_device", "create_default_device"} - {missing}
    fake = SimpleNamespace(**{name: getattr(dist.ProcessGroupGloo, name) for name in names})
    monkeypatch.setattr(dist, "ProcessGroupGloo", fake)
    assert autograd_seams.wide_gloo() is None
    monkeypatch.delattr(dist, "ProcessGroupGloo")
    assert autograd_seams.wide_gloo() is None


def test_collectives_that_torch_is_to_check_stay_torchs(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert autograd_seams.wide_gloo() is None


def test_many_tensors_at_once_and_one_by_one(monkeypatch):
    sources = [torch.tensor([3.0, 4.0]), torch.full((2, 2), 0.5)]
    for missing in ((), ("_foreach_copy_", "_foreach_norm")):
        for name in missing:
            monkeypatch.delattr(torch, name)
        targets = [torch.zeros_like(source) for source in sources]
        autograd_seams.copy_all(targets, sources)
        assert all(map(torch.equal, targets, sources))
        norms = autograd_seams.norms_of([*sources, torch.full((1,), 1e30)])
        assert norms.dtype == torch.float64
        torch.testing.assert_close(norms, torch.tensor([5.0, 1.0, 1e30]).double())


def test_what_torch_may_not_say_about_tensors_and_layers():
    x = torch.zeros(2)
    before = autograd_seams.version_of(x)
    x.add_(1)
    assert autograd_seams.version_of(x) == before + 1
    with torch.inference_mode():
        assert autograd_seams.version_of(torch.zeros(2)) == -1
    silent = SimpleNamespace(is_inference=lambda: False)
    assert autograd_seams.version_of(silent) == -1, "only contents tell then"
    with pytest.raises(ValueError, match="2D or 3D"):
        autograd_seams.check_input_dim(torch.nn.BatchNorm1d(2), torch.zeros(2))
    autograd_seams.check_input_dim(SimpleNamespace(), torch.zeros(2))
    layer = torch.nn.Linear(2, 2)
    assert autograd_seams.ignored_names(layer) == set()
    layer._ddp_params_and_buffers_to_ignore = ["module.bias"]
    assert autograd_seams.ignored_names(layer) == {"bias"}


def test_a_hook_runs_before_others_after_a_step(monkeypatch):
    calls: list[str] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append("user"))
    handle = run_first_after_step(optimizer, lambda *_: calls.append("ours"))
    optimizer.step()
    assert calls == ["ours", "user"]
    handle.remove()
    hooks = type("Hooks", (dict,), {})()
    monkeypatch.setattr(optimizer, "_optimizer_step_post_hooks", hooks, raising=False)
    run_first_after_step(optimizer, lambda *_: calls.append("in a dict"))  # not in order
    optimizer.step()
    assert calls[-1] == "in a dict"


def test_norms_are_asked_also_of_a_clip_that_was_imported_before(monkeypatch):
    from torch.nn.utils import clip_grad_norm_

    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    undo = gradient_seams.own_total_norm(
        lambda original, tensors, *args: 2 * original(tensors, *args)
    )
    assert undo is not None
    assert clip_grad_norm_([parameter], 100.0) == 8.0
    undo()
    assert clip_grad_norm_([parameter], 100.0) == 4.0
    monkeypatch.delattr(torch.nn.utils.clip_grad, "_get_total_norm")
    assert gradient_seams.own_total_norm(lambda *_: torch.zeros(())) is None


def test_a_scaler_hears_of_an_overflow_elsewhere(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    undo = gradient_seams.own_found_inf(lambda _, found: found.fill_(1.0))
    assert undo is not None
    for overflows in (True, False):
        parameter.grad = torch.ones(2)
        before = parameter.detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        assert torch.equal(before, parameter) == overflows
        undo()
    monkeypatch.delattr(torch.amp.GradScaler, "_unscale_grads_")
    assert gradient_seams.own_found_inf(lambda *_: None) is None


def test_native_readers_are_watched_until_that_is_undone(monkeypatch):
    monkeypatch.delattr(torch, "asarray")  # as in a version that lacks it
    names = (
        *((torch, name) for name in ("tensor", "as_tensor", "sparse_coo_tensor")),
        *((torch.Tensor, name) for name in ("as_subclass", "new_tensor", "_make_subclass")),
        *((torch.nn.Parameter, "__new__"), (torch.utils, "swap_tensors")),
        *((torch._C.ScriptMethod, "__call__"), (dist.ProcessGroup, "broadcast")),
    )
    before = [vars(owner).get(name) for owner, name in names]
    weight = torch.nn.Parameter(torch.ones(2))
    seen: list[object] = []
    undo = reads.watch_native_readers(lambda: seen.append("all"), seen.append)
    assert not hasattr(torch, "asarray")
    torch.nn.Parameter(weight)
    assert any(value is weight for args, _ in seen for value in args)
    torch.utils.swap_tensors(torch.ones(1), torch.ones(1))
    assert seen[-1] == "all"
    undo()
    assert [vars(owner).get(name) for owner, name in names] == before


def test_compiling_is_in_use_once_something_was_compiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", None)
    assert not reads.is_compiling_in_use()
    counters = {"frames": {"total": 0}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    assert not reads.is_compiling_in_use()
    counters["frames"]["total"] = 1
    assert reads.is_compiling_in_use()
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    assert reads.is_compiling_in_use()  # a version that does not say
