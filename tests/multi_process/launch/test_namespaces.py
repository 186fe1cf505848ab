"""A user of pytorch_lightning is told which import to use, whichever was imported first."""

import subprocess
import sys

import pytest

pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.multi_process

CHECK = """
import logging, sys, warnings
logging.disable(); warnings.simplefilter("ignore")
{imports}
assert "lean_ddp" in pytorch_lightning.strategies.StrategyRegistry
for strategy in ("lean_ddp", "lean_ddp_fork", lightning_dp.LeanDDPStrategy()):
    try:
        pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    except ValueError as error:
        assert "import lightning.pytorch as pl" in str(error), error
    else:
        raise SystemExit("no error")
import lightning
trainer = lightning.Trainer(strategy="lean_ddp", accelerator="cpu", devices=1, logger=False)
assert isinstance(trainer.strategy, lightning_dp.LeanDDPStrategy)
print("explained")
"""


def test_the_other_library_explains_whichever_comes_first():
    orders = ["import lightning_dp, pytorch_lightning", "import pytorch_lightning, lightning_dp"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CHECK.format(imports=order)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for order in orders
    ]
    for process in running:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert "explained" in out


def test_a_reload_changes_nothing():
    import importlib

    import lightning_dp
    from lightning_dp.registration.namespaces import _AfterImport

    importlib.reload(lightning_dp)
    importlib.reload(lightning_dp)
    assert sum(isinstance(finder, _AfterImport) for finder in sys.meta_path) <= 1
