"""An unchanged LightningModule under ``lean_ddp``, at Trainer level."""

from __future__ import annotations

import re

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import LeanDDPStrategy
from tests.support import grounds
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.ranks import RankError, run_ranks
from tests.support.trainers import ddp, lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]


class Net(pl.LightningModule):
    def __init__(self, dtype=torch.float32, batch_norm=False, optimizer="sgd"):
        super().__init__()
        torch.manual_seed(3)
        norm = [nn.BatchNorm1d(16)] if batch_norm else []
        self.net = nn.Sequential(
            nn.Linear(6, 16), *norm, nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2)
        )
        self.net.to(dtype)
        self.kind = optimizer
        self.norms = []
        self.after_backward = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y.to(x.dtype))
        if not torch.compiler.is_compiling():
            self.log("loss", loss)
        return loss

    def on_after_backward(self):
        self.after_backward.append(self.net[0].weight.grad.detach().float().clone())

    def on_before_optimizer_step(self, optimizer):
        grads = [
            p.grad.detach().flatten().double() for p in self.parameters() if p.grad is not None
        ]
        self.norms.append(float(torch.cat(grads).norm()))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x), y.to(x.dtype)), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        if self.kind == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def dataset(n=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], 1))


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def _same_global_batch(rank, world_size, port, kwargs):
    module = Net(torch.float64)
    data = DataLoader(dataset(dtype=torch.float64), batch_size=12 // world_size)
    t = trainer(world_size, port, lean(), max_epochs=3, **kwargs)
    t.fit(module, data)
    return [p.tolist() for p in module.parameters()], module.norms


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
    ],
    ids=["plain", "clip_norm", "clip_value", "accumulate"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_several_ranks_equal_one_rank_with_the_same_global_batch(world_size, kwargs):
    """float64, no BatchNorm: the largest difference of any weight is at most 1e-9."""
    one, norms_of_one = ranks(_same_global_batch, 1, kwargs)[0]
    for many, norms in ranks(_same_global_batch, world_size, kwargs):
        assert norms == pytest.approx(norms_of_one, rel=1e-9)
        for a, b in zip(one, many, strict=True):
            assert (torch.tensor(a) - torch.tensor(b)).abs().max() <= 1e-9


def _no_sync_control(rank, world_size, port):
    class Silent(LeanDDPStrategy):
        def pre_backward(self, closure_loss):
            pass

        def setup(self, trainer):
            super().setup(trainer)
            self.silence = self._engine.window.closed()
            self.silence.__enter__()

        def on_train_batch_start(self, batch, batch_idx):
            pass

    module = Net(torch.float64)
    strategy = Silent(cluster_environment=LightningEnvironment(), check_replicas_every_n_steps=0)
    t = trainer(world_size, port, strategy, max_epochs=3)
    t.fit(module, DataLoader(dataset(dtype=torch.float64), batch_size=6))
    return [p.tolist() for p in module.parameters()]


def test_control_without_communication_the_weights_differ():
    a, b = ranks(_no_sync_control, 2)
    assert a != b


def _hooks_see_averages(rank, world_size, port):
    module = Net()
    t = trainer(world_size, port, lean())
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))
    gradients = {str(i): g for i, g in enumerate(module.after_backward)}
    return {k: g.tolist() for k, g in gradients.items()}


def test_on_after_backward_sees_averaged_gradients():
    first, second = ranks(_hooks_see_averages, 2)
    assert first == second


def _precision(rank, world_size, port, precision, plugin):
    module = Net(batch_norm=True, optimizer="adamw")
    t = trainer(
        world_size, port, plugin(), precision=precision, max_epochs=4, gradient_clip_val=1.0
    )
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))
    dtypes = {str(p.dtype) for p in module.parameters()}
    metrics = t.validate(module, DataLoader(dataset(), batch_size=4, shuffle=True), verbose=False)
    return [p.double().tolist() for p in module.parameters()], dtypes, metrics[0]["val"]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", "float32"),
        ("bf16-mixed", "float32"),
        ("bf16-true", "bfloat16"),
        ("64-true", "float64"),
    ],
)
def test_precision_plugins(precision, dtype):
    lean_runs = ranks(_precision, 2, precision, lean)
    ddp_runs = ranks(_precision, 2, precision, ddp)
    assert lean_runs[0][0] == lean_runs[1][0], "replicas are bit-identical"
    assert lean_runs[0][1] == {f"torch.{dtype}"} == ddp_runs[0][1]
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for ours, theirs in zip(lean_runs[0][0], ddp_runs[0][0], strict=True):
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=tolerance
        )


def _scaler(rank, world_size, port):
    """fp16 autocast with a gradient scaler; one rank overflows in its second step."""
    from lightning.pytorch.plugins import MixedPrecision

    class Overflows(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and rank == 1 else loss

    module = Overflows()
    scaler = torch.amp.GradScaler(grounds.CURRENT.device_type, init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", grounds.CURRENT.device_type, scaler=scaler)
    strategy = lean()
    scales, skipped = [], []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            scales.append(scaler.get_scale())
            skipped.append(trainer.strategy._engine.windows.last_step_skipped)

    t = trainer(world_size, port, strategy, plugins=[plugin], callbacks=[Watch()])
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))
    return scales, skipped, [p.tolist() for p in module.parameters()]


def test_gradient_scalers_decide_alike_on_all_ranks():
    first, second = ranks(_scaler, 2)
    assert first == second
    assert first[1] == [False, True, False, False, False, False]
    assert first[0][1] == first[0][0] / 2


def _stages(rank, world_size, port, root):
    module = Net(batch_norm=True)
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)
    t = trainer(world_size, port, lean(), root, max_epochs=2, num_sanity_val_steps=1)
    t.fit(module, loader, loader)
    first = t.callback_metrics["val"].item()
    validated = t.validate(module, loader, verbose=False)[0]["val"]
    tested = t.test(module, loader, verbose=False)[0]["val"]
    predicted = torch.cat(t.predict(module, loader))
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    assert hooks == [0] * len(hooks), "teardown leaves no hook behind"
    before = weights(module)
    t.fit_loop.max_epochs = 4
    t.fit(module, loader, loader)  # a second fit on the same module
    assert any((a != b).any() for a, b in zip(before, weights(module), strict=True))
    assert set(module.state_dict()) == set(Net(batch_norm=True).state_dict()), "plain keys"
    return first, validated, tested, len(predicted), [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_fit_validate_test_predict_and_fit_again(world_size, tmp_path):
    runs = ranks(_stages, world_size, str(tmp_path))
    for first, validated, tested, _, _ in runs:
        assert first == pytest.approx(validated)
        assert validated == pytest.approx(tested)
    assert sum(run[3] for run in runs) == 48
    assert all(run[4] == runs[0][4] for run in runs)


def _save(rank, world_size, port, make, path):
    module = Net(optimizer="adamw")
    t = trainer(world_size, port, make(), max_epochs=1)
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))
    t.save_checkpoint(path)


def _resume(rank, world_size, port, make, path):
    module = Net(optimizer="adamw")
    t = trainer(world_size, port, make(), max_epochs=3)
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True), ckpt_path=path)
    assert t.global_step == 3 * 6
    return [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize(("saver", "loader"), [(lean, ddp), (ddp, lean), (lean, lean)])
def test_checkpoints_are_interchangeable_with_ddp(saver, loader, tmp_path):
    path = str(tmp_path / "one.ckpt")
    ranks(_save, 2, saver, path)
    saved = torch.load(path, weights_only=True)
    assert set(saved["state_dict"]) == set(Net().state_dict())
    resumed = ranks(_resume, 2, loader, path)
    straight = ranks(_resume, 2, ddp, None)
    for got, want in zip(resumed[0], straight[0], strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-5)


def _compiled(rank, world_size, port, compiled):
    module = Net()
    target = torch.compile(module, backend="aot_eager") if compiled else module
    t = trainer(world_size, port, lean(), max_epochs=2)
    t.fit(target, DataLoader(dataset(), batch_size=4, shuffle=True))
    return [p.tolist() for p in module.parameters()]


@pytest.mark.usefixtures("compilers")
def test_a_compiled_module_trains_the_same():
    eager = ranks(_compiled, 2, False)
    compiled = ranks(_compiled, 2, True, timeout_s=180)
    assert compiled[0] == compiled[1]
    for a, b in zip(eager[0], compiled[0], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


def _different(rank, world_size, port, what):
    module = Net()
    if rank == 1:
        if what == "shape":
            module.net[0] = nn.Linear(6, 17)
        elif what == "frozen":
            module.net[2].weight.requires_grad_(False)
        elif what == "dtype":
            module.net[2].double()
        elif what == "order":
            module.net[2], module.net[3] = module.net[3], module.net[2]
        elif what == "tied":
            module.net[2].weight = nn.Parameter(torch.zeros(16, 16))
            module.net.extra = nn.Linear(16, 16)
    t = trainer(world_size, port, lean())
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", "net.0.weight"),
        ("frozen", "requires_grad"),
        ("dtype", "float64"),
        ("order", "net.2"),
    ],
)
def test_different_modules_are_named_on_every_rank(what, named):
    for traceback in ranks(_different, 2, what, expect_failure=True):
        assert "ReplicaMismatchError" in traceback
        assert named in traceback
        assert "[1]" in traceback


def _start_values(rank, world_size, port):
    module = Net(batch_norm=True)
    with torch.no_grad():
        for tensor in (*module.parameters(), module.net[1].running_mean):
            tensor.add_(rank)  # e.g. an unseeded initialisation

    class Look(pl.Callback):
        def on_train_start(self, trainer, module):
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            assert_equal_on_all_ranks(tensors)

    t = trainer(world_size, port, lean(), callbacks=[Look()])
    t.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))


def test_replicas_start_from_rank_0s_values():
    ranks(_start_values, 3)


def _gradient_error(rank, world_size, port):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if rank == 1 and batch_idx == 2:
                loss.register_hook(self._boom)
            return loss

        def _boom(self, grad):
            raise ArithmeticError("boom in backward of rank 1")

    t = trainer(world_size, port, lean())
    t.fit(Breaks(), DataLoader(dataset(), batch_size=4, shuffle=True))


def test_an_error_in_one_ranks_backward_reaches_all_ranks_by_name():
    first, second = ranks(_gradient_error, 2, expect_failure=True, timeout_s=30)
    assert "boom in backward of rank 1" in second
    assert "RankFailedError" in first
    assert re.search(r"rank 1\b.* failed", first)
    assert "boom in backward of rank 1" in first


def test_ranks_fail_the_test_when_they_differ():
    """Control for the tools used above."""
    with pytest.raises(RankError, match="differs between rank 0 and 1"):
        run_ranks(_differ, 2)


def _differ(rank, world_size):
    assert dist.is_initialized()
    assert_equal_on_all_ranks({"x": torch.tensor([float(rank)])})
