"""Train with ``lean_ddp`` after each order of imports, and print what came of it, one JSON line a case.

Each case is a fork of a process that has imported much of what Lightning imports (it takes seconds), and
neither Lightning nor lightning_dp.
"""

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

BEFORE = "fsspec.implementations.local jsonargparse rich.progress torch._dynamo torchmetrics"
BEFORE += " torch.distributed.checkpoint torch.distributed.fsdp"
MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
QUIET |= {"enable_checkpointing": False, "enable_model_summary": False, "max_steps": 2}


class Absent:
    """Makes a package one that is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def trainer(package: str, strategy: object):
    return importlib.import_module(MODULES[package]).Trainer(strategy=strategy, **QUIET)


def by_name(package: str):
    return trainer(package, "lean_ddp")


def by_instance(package: str):
    return trainer(package, ours())


def by_class_path(package: str):
    cli = importlib.import_module(f"{MODULES[package]}.cli")
    boring = importlib.import_module(f"{MODULES[package]}.demos.boring_classes")
    given = [
        "--trainer.strategy=lightning_dp.LeanDDPStrategy",
        "--trainer.strategy.bucket_cap_mb=8",
    ]
    options = {"run": False, "save_config_callback": None, "trainer_defaults": QUIET}
    made = cli.LightningCLI(boring.BoringModel, args=given, **options).trainer
    assert made.strategy.options.bucket_cap_mb == 8
    return made


def ours(**options):
    from lightning_dp import LeanDDPStrategy

    return LeanDDPStrategy(**options)


HOW = {"name": by_name, "instance": by_instance, "class_path": by_class_path}


def trains(made, package: str) -> str:
    boring = importlib.import_module(f"{MODULES[package]}.demos.boring_classes")
    steps = []

    class Model(boring.BoringModel):
        def on_train_batch_end(self, *_):
            steps.append(
                self.trainer.strategy.window_totals.micro_batches
            )  # the engine has reduced

    made.fit(Model())
    assert type(made.strategy).__name__ == "LeanDDPStrategy"
    assert isinstance(made.strategy, importlib.import_module(MODULES[package]).strategies.Strategy)
    assert steps == [1, 1]
    return "trains"


def case(installed: str, first: str, package: str, how: str, variable: str = "") -> str:
    """One cell of the table."""
    if installed != "both":
        absent = next(name for name in MODULES if name != installed)
        sys.meta_path.insert(0, Absent(absent))
    if variable:
        os.environ["LEAN_DDP_LIGHTNING"] = variable
    if first == "lightning_dp":
        import lightning_dp

        _ = (
            lightning_dp.LeanDDPStrategy if how == "instance" else None
        )  # as `from lightning_dp import`
    importlib.import_module(MODULES[package])
    import lightning_dp

    if installed != "both":
        assert absent not in sys.modules
    return trains(HOW[how](package), package)


def refused(make: Callable[[], object]) -> str:
    try:
        return f"made {make()}"
    except ValueError as error:  # a ConfigError is one
        return f"{type(error).__name__}: {error}"


def second_trainer(first: str) -> list[str]:
    """Trainers of the other package in a process that is bound."""
    import lightning_dp  # noqa: F401

    other = next(name for name in MODULES if name != first)
    bound = trainer(first, "lean_ddp")
    assert "LeanDDPStrategy" in repr(bound.strategy)  # anybody else may ask
    trainer(first, "lean_ddp_fork")
    return [refused(lambda s=s: trainer(other, s)) for s in ("lean_ddp", bound.strategy)]


def fabric() -> list[str]:
    """By name and by instance."""
    import lightning_dp  # noqa: F401

    strategies = ("lean_ddp_fork", trainer("lightning", "lean_ddp").strategy)
    kinds = [importlib.import_module(module).Fabric for module in FABRICS.values()]
    return [refused(lambda f=f, s=s: f(strategy=s)) for f in kinds for s in strategies]


def callbacks_and_demos(package: str) -> str:
    """What else of ours derives from a class of Lightning's."""
    pl = importlib.import_module(MODULES[package])
    import lightning_dp
    from lightning_dp.demos.digits import DigitsDataModule, DigitsModule

    loggers = importlib.import_module(f"{MODULES[package]}.loggers")
    monitor, timeline = lightning_dp.LeanDDPMonitor(), lightning_dp.StepTimeline()
    assert isinstance(monitor, pl.Callback)
    assert isinstance(timeline, pl.Callback)
    folder = sys.argv[1]
    options = QUIET | {"strategy": "lean_ddp", "callbacks": [monitor], "log_every_n_steps": 1}
    made = pl.Trainer(**options | {"logger": loggers.CSVLogger(folder)}, limit_val_batches=1)
    made.fit(DigitsModule(), DigitsDataModule())
    assert "lean/loss" in Path(made.logger.log_dir, "metrics.csv").read_text()
    return "follow"


def cases() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}

    def add(run, *args):
        found[" ".join([run.__name__, *args])] = lambda: run(*args)

    for first in ("lightning_dp", "library"):
        for how in HOW:
            for package in MODULES:
                add(case, package, first, package, how)
                add(case, "both", first, package, how)
    add(case, "both", "lightning_dp", "pytorch_lightning", "instance", "pytorch_lightning")
    for package in MODULES:
        add(second_trainer, package)
    add(fabric)
    add(callbacks_and_demos, "pytorch_lightning")
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    for name in BEFORE.split():
        importlib.import_module(name)
    gc.freeze()
    for name, run in cases().items():
        sys.stdout.flush()
        if os.fork():
            os.wait()
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                came = run()
            except Exception as error:
                came = f"{type(error).__name__}: {error}"
                if type(error).__name__ != "ConfigError":
                    came += "\n" + traceback.format_exc()
            except SystemExit as error:
                came = f"SystemExit {error.code}: {printed.getvalue()}"
        print(json.dumps([name, came]), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
