"""What programs of tests load late is there when they use it (support/sooner/sitecustomize.py)."""

from __future__ import annotations

import pytest

from tests.support.programs import python, run_program

pytestmark = pytest.mark.multi_process

PROGRAM = """
import sys
import traceback

import lightning.pytorch as pl
import lightning_dp
import scipy.signal
import sitecustomize
import sklearn.datasets
import sklearn.model_selection
import torch
from lightning.fabric.wrappers import OptimizedModule
from lightning.pytorch.demos.boring_classes import BoringModel


execute = sitecustomize.execute


def told(module):
    executed = execute(module)
    if executed:
        print("EXECUTED", module.__name__, *traceback.format_stack()[-12:], sep="\\n")
    return executed


def late():
    return {name for name in sitecustomize.FEW if sitecustomize.waits(sys.modules[name])}


sitecustomize.execute = told
model = BoringModel()
sklearn.datasets.load_digits()
quiet = {"deterministic": True, "logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
pl.Trainer(accelerator="cpu", devices=1, strategy="lean_ddp", max_steps=2, **quiet).fit(model)
assert not isinstance(model, OptimizedModule)
assert late() == set(sitecustomize.FEW), f"a training without them loads {late()}"

compiled, x = torch.compile(model, backend="eager"), torch.randn(3, 32)
assert isinstance(compiled, OptimizedModule)
assert torch.equal(compiled(x), model(x))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
optimizer = torch.optim.SGD(model.parameters(), 0.1)
compiled(x).sum().backward()
torch.compile(optimizer.step, backend="eager")()
import torch._dynamo.testing
assert torch._inductor.config.deterministic, "it was set before there was this module"

from scipy.signal import windows
assert len(windows.hann(4)) == 4
import scipy.stats
assert scipy.stats.norm.cdf(0.0) == 0.5
from torch.distributed.tensor import DTensor, Placement
assert issubclass(DTensor, torch.Tensor)
from torchmetrics.classification import BinaryConfusionMatrix
metric = BinaryConfusionMatrix()
metric.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
figure, _ = metric.plot()
from matplotlib.figure import Figure
assert isinstance(figure, Figure)
assert not late(), late()
print("all real")
"""


def test_a_training_loads_none_of_it_and_whoever_uses_it_gets_the_real_thing(tmp_path):
    (tmp_path / "use.py").write_text(PROGRAM)
    run = run_program(python("use.py"), cwd=tmp_path)
    assert run.code == 0, run.out
    assert "all real" in run.out
