"""Libraries that train through Lightning: does ``lean_ddp`` train what ``ddp`` and one device do?

    python -m benchmarks.libraries                       # all of the table, one after the other
    python -m benchmarks.libraries darts chemprop        # these

Each library is installed into an environment of its own, over the one that runs (its torch and Lightning
stay), and its own model is trained on the same seed three times: on one device, and on two ranks with
``ddp`` and with ``lean_ddp``. Where a step sees all rows, all three have the same gradients; the table
holds the largest difference of a weight. Needs a package index.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
RUNS = (("auto", 1), ("ddp", 2), ("lean_ddp", 2))
KEPT = ("torch", "lightning", "pytorch-lightning", "numpy")
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
STEPS, ROWS = 8, 32

Train = Callable[[dict[str, Any]], nn.Module]
TRAIN: dict[str, Train] = {}


def library(train: Train) -> Train:
    """A library of the table, by its name on the index; ``train`` takes a Trainer's options."""
    TRAIN[train.__name__.replace("_", "-")] = train
    return train


def loader(data: Any, world: int, **options: Any) -> Any:
    """All rows in one step, whatever the number of ranks."""
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=ROWS // world, shuffle=False, **options)


def series() -> Any:
    """Four series of different shape, as a long table."""
    import numpy as np
    import pandas as pd

    t = np.arange(64)
    tables = [{"unique_id": str(i), "ds": t, "y": np.sin(t / (2 + i)) + i} for i in range(4)]
    return pd.concat(map(pd.DataFrame, tables), ignore_index=True)


# Built on pytorch_lightning


@library
def neuralforecast(options: dict[str, Any]) -> nn.Module:
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    model = NHITS(
        h=4, input_size=16, max_steps=STEPS, batch_size=4, scaler_type="standard", random_seed=1, **options
    )  # fmt: skip
    forecast = NeuralForecast(models=[model], freq=1)
    forecast.fit(series())
    return forecast.models[0]


@library
def darts(options: dict[str, Any]) -> nn.Module:
    import numpy as np
    from darts import TimeSeries
    from darts.models import NBEATSModel

    values = np.sin(np.arange(ROWS + 11) / 3).astype(np.float32)  # 32 windows
    model = NBEATSModel(
        8, 4, n_epochs=STEPS, batch_size=ROWS // options["devices"], layer_widths=16, num_stacks=2,
        random_state=1, pl_trainer_kwargs=options,
    )  # fmt: skip
    model.fit(TimeSeries.from_values(values))
    return model.model


@library
def pytorch_tabular(options: dict[str, Any]) -> nn.Module:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    table = pd.DataFrame(torch.randn(ROWS, 3).numpy(), columns=["a", "b", "y"])
    options = dict(options)
    accelerator, devices = options.pop("accelerator"), options.pop("devices")
    for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"):
        options.pop(name)
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=["a", "b"], num_workers=0),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="8-8", dropout=0.0),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=ROWS // devices, max_epochs=STEPS, accelerator=accelerator, devices=devices,
            auto_lr_find=False, early_stopping=None, checkpoints=None, load_best=False,
            progress_bar="none", trainer_kwargs=options,
        ),
        verbose=False,
    )  # fmt: skip
    model.fit(train=table, validation=table, seed=1)
    return model.model


@library
def lightly(options: dict[str, Any]) -> nn.Module:
    import pytorch_lightning as pl
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    module = LinearClassifier(
        backbone, batch_size_per_device=ROWS // options["devices"], feature_dim=8, num_classes=5,
        topk=(1,), freeze_model=False,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.randn(ROWS, 6), torch.arange(ROWS) % 5)
    pl.Trainer(max_epochs=STEPS, **options).fit(module, loader(rows, options["devices"]))
    return module


@library
def lightning_bolts(options: dict[str, Any]) -> nn.Module:
    import pytorch_lightning as pl
    from pl_bolts.models.regression import LogisticRegression

    module = LogisticRegression(input_dim=6, num_classes=5, learning_rate=0.1)
    rows = torch.utils.data.TensorDataset(torch.randn(ROWS, 6), torch.arange(ROWS) % 5)
    pl.Trainer(max_epochs=STEPS, **options).fit(module, loader(rows, options["devices"]))
    return module


# Built on lightning


@library
def pytorch_forecasting(options: dict[str, Any]) -> nn.Module:
    import lightning.pytorch as pl
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    data = TimeSeriesDataSet(
        series()[lambda table: table.ds < 18], time_idx="ds", target="y", group_ids=["unique_id"],
        max_encoder_length=8, max_prediction_length=3, time_varying_unknown_reals=["y"],
    )  # fmt: skip
    assert len(data) == ROWS, len(data)
    module = NBeats.from_dataset(data, widths=[8, 16], log_interval=-1)
    rows = data.to_dataloader(train=False, batch_size=ROWS // options["devices"])
    pl.Trainer(max_epochs=STEPS, **options).fit(module, rows)
    return module


@library
def chemprop(options: dict[str, Any]) -> nn.Module:
    import lightning.pytorch as pl
    from chemprop import data, models
    from chemprop import nn as parts

    rows = [
        data.MoleculeDatapoint.from_smi("C" * (i % 8 + 1) + "O", [i / ROWS]) for i in range(ROWS)
    ]
    rows = data.MoleculeDataset(rows)
    module = models.MPNN(
        parts.BondMessagePassing(d_h=16), parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=16, hidden_dim=16), batch_norm=False,
    )  # fmt: skip
    batches = data.build_dataloader(rows, ROWS // options["devices"], shuffle=False)
    pl.Trainer(max_epochs=STEPS, **options).fit(module, batches)
    return module


# One run, inside of the library's environment


def train(name: str, strategy: str, devices: int, out: Path) -> None:
    """Train and leave the weights in ``out``."""
    import lightning_dp  # noqa: F401

    torch.manual_seed(1)
    module = TRAIN[name]({**QUIET, "strategy": strategy, "devices": devices})
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        torch.save({key: value.detach() for key, value in module.named_parameters()}, out)


# All runs


def environment(name: str, folder: Path) -> Path:
    """Install ``name`` over this environment; returns its Python."""
    python = folder / "env" / "bin" / "python"
    venv.create(folder / "env", with_pip=False)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "env" / "lib" / version / "site-packages"
    (site / "below.pth").write_text("\n".join(sites()))
    kept = folder / "kept.txt"
    kept.write_text(
        "\n".join(f"{each}=={metadata.version(each).partition('+')[0]}" for each in KEPT)
    )
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-c", kept, name]
    subprocess.run(pip, check=True)
    return python


def sites() -> list[str]:
    """Where this environment's packages lie."""
    here = sysconfig.get_paths()["purelib"]
    return [here, *(path for path in sys.path if path.endswith("site-packages") and path != here)]


def run(name: str, folder: Path) -> list[str]:
    """One row of the table: what was installed, and how far apart the weights are."""
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(name, folder)
    ask = f"from importlib.metadata import version; print(version({name!r}))"
    version = subprocess.check_output([python, "-c", ask], text=True).strip()
    weights: dict[str, dict[str, torch.Tensor] | str] = {}
    for strategy, devices in RUNS:
        out = folder / f"{strategy}.pt"
        command = [
            python,
            "-m",
            "benchmarks.libraries",
            "--train",
            name,
            strategy,
            str(devices),
            out,
        ]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        )  # fmt: skip
        (folder / f"{strategy}.log").write_text(done.stdout)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        weights[strategy] = torch.load(out) if done.returncode == 0 else last[:120]
    one, ddp, lean = weights.values()
    return [name, version, apart(ddp, one), apart(lean, one), apart(lean, ddp)]


def apart(a: dict[str, torch.Tensor] | str, b: dict[str, torch.Tensor] | str) -> str:
    """The largest difference of a weight, or why there is none."""
    if isinstance(a, str) or isinstance(b, str):
        return next(each for each in (a, b) if isinstance(each, str))
    assert a.keys() == b.keys()
    return f"{max(float((a[name] - b[name]).abs().max()) for name in a):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRAIN)}")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/libraries"), help="environments and logs"
    )
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        name, strategy, devices, out = options.train
        train(name, strategy, int(devices), Path(out))
        return
    print(
        "| library | version | `ddp` to one device | `lean_ddp` to one device | `lean_ddp` to `ddp` |"
    )
    print("|---|---|---|---|---|")
    for name in options.names or TRAIN:
        try:
            row = run(name, (options.folder / name).absolute())
        except subprocess.CalledProcessError:
            row = [name, "cannot be installed here", "", "", ""]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
