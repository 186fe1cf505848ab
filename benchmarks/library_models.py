"""The libraries of the table: each trains a model of its own, the way its documents say.

Where a library leaves the choice, a step sees all rows, without dropout, batch statistics or a sample of
the rows, so that one device and two ranks have the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS, ROWS = 8, 32
UNUSED = "ddp_find_unused_parameters_true"  # where plain ddp ends in an error


@dataclass(frozen=True)
class Library:
    """One row of the table.

    Attributes:
        requirement: What pip installs: the library, and what it needs and does not say. ``torch`` is the
            index's own build of our version.
        given: How a user hands ``strategy="lean_ddp"`` to the library.
        note: What a reader of the figures must know.
        train: Trains with a Trainer's options; returns the module whose weights are compared.
        ddp: The name of ``ddp`` that it is compared with.
    """

    requirement: str
    given: str
    note: str
    train: Callable[[dict[str, Any]], nn.Module]
    ddp: str = "ddp"

    @property
    def name(self) -> str:
        return self.requirement.split()[0].partition("[")[0]


LIBRARIES: dict[str, Library] = {}


def library(requirement: str, given: str, note: str = "", ddp: str = "ddp") -> Callable[..., Any]:
    """Decorates a function that trains: it is a row of the table."""

    def add(train: Callable[[dict[str, Any]], nn.Module]) -> Callable[..., nn.Module]:
        row = Library(requirement, given, note, train, ddp)
        LIBRARIES[row.name] = row
        return train

    return add


def loader(data: Any, options: dict[str, Any], **more: Any) -> Any:
    """All rows in one step, whatever the number of ranks."""
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=ROWS // options["devices"], shuffle=False, **more)


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options that a library does not set itself."""
    return {name: value for name, value in options.items() if name not in names}


def series(length: int = 64, **columns: str) -> Any:
    """Four series of different shape, as a long table."""
    import numpy as np
    import pandas as pd

    t = np.arange(length)
    tables = [{"unique_id": str(i), "ds": t, "y": np.sin(t / (2 + i)) + i} for i in range(4)]
    return pd.concat(map(pd.DataFrame, tables), ignore_index=True).rename(columns=columns)


# Built on pytorch_lightning


@library("neuralforecast", "an argument of the model")
def neuralforecast(options: dict[str, Any]) -> nn.Module:
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    model = NHITS(
        h=4, input_size=16, max_steps=STEPS, batch_size=4 // options["devices"], random_seed=1,
        windows_batch_size=None, inference_windows_batch_size=64,  # None: all, no random sample
        scaler_type="standard", **options,
    )  # fmt: skip
    forecast = NeuralForecast(models=[model], freq=1)
    forecast.fit(series())
    return forecast.models[0]


@library("darts", "`pl_trainer_kwargs`")
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


@library("pytorch-tabular requests", "`TrainerConfig(trainer_kwargs=...)`")
def pytorch_tabular(options: dict[str, Any]) -> nn.Module:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    table = pd.DataFrame(torch.randn(ROWS, 3).numpy(), columns=["a", "b", "y"])
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=["a", "b"], num_workers=0),
        model_config=CategoryEmbeddingModelConfig(
            task="regression", layers="8-8", batch_norm_continuous_input=False
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=ROWS // options["devices"], max_epochs=STEPS, auto_lr_find=False,
            early_stopping=None, checkpoints=None, load_best=False, progress_bar="none",
            accelerator="cpu", devices=options["devices"],
            trainer_kwargs=without(options, "accelerator", "devices", "logger"),
        ),
        verbose=False,
    )  # fmt: skip
    model.fit(train=table, validation=table, seed=1)
    return model.model


@library("lightly torch", "the user's own Trainer")
def lightly(options: dict[str, Any]) -> nn.Module:
    import pytorch_lightning as pl
    from lightly.utils.benchmarking import FinetuneClassifier

    backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    module = FinetuneClassifier(
        backbone, batch_size_per_device=ROWS // options["devices"], feature_dim=8, num_classes=5,
        topk=(1,),
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.randn(ROWS, 6), torch.arange(ROWS) % 5)
    pl.Trainer(max_epochs=STEPS, **options).fit(module, loader(rows, options))
    return module


@library("neuralprophet pandas<3", "`trainer_config`")
def neuralprophet(options: dict[str, Any]) -> nn.Module:
    import pandas as pd
    from neuralprophet import NeuralProphet, set_random_seed

    set_random_seed(1)
    table = pd.DataFrame({"ds": pd.date_range("2026-01-01", periods=ROWS), "y": range(ROWS)})
    model = NeuralProphet(
        epochs=STEPS, batch_size=ROWS, learning_rate=0.01, n_changepoints=2,
        yearly_seasonality=False, weekly_seasonality=True, trainer_config=options,
    )  # fmt: skip
    model.fit(table, freq="D", progress=None, metrics=False)
    return model.model


@library("torchphysics", "the user's own Trainer", "every rank sees all points")
def torchphysics(options: dict[str, Any]) -> nn.Module:
    import pytorch_lightning as pl
    import torchphysics as tp

    x, u = tp.spaces.R1("x"), tp.spaces.R1("u")
    model = tp.models.FCN(input_space=x, output_space=u, hidden=(8,))
    line = tp.domains.Interval(x, 0, 1)
    equation = tp.conditions.PINNCondition(
        model, tp.samplers.GridSampler(line, ROWS).make_static(),
        lambda u, x: tp.utils.laplacian(u, x) + 1,
    )  # fmt: skip
    ends = tp.conditions.PINNCondition(
        model, tp.samplers.GridSampler(line.boundary, 2).make_static(), lambda u: u
    )
    solver = tp.solver.Solver([equation, ends])
    pl.Trainer(max_steps=STEPS, **options).fit(solver)
    return solver


# Built on lightning


@library("pytorch-forecasting", "the user's own Trainer")
def pytorch_forecasting(options: dict[str, Any]) -> nn.Module:
    import lightning.pytorch as pl
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    data = TimeSeriesDataSet(
        series(18), time_idx="ds", target="y", group_ids=["unique_id"], max_encoder_length=8,
        max_prediction_length=3, time_varying_unknown_reals=["y"],
    )  # fmt: skip
    assert len(data) == ROWS, len(data)
    module = NBeats.from_dataset(data, widths=[8, 16], dropout=0.0, log_interval=-1)
    rows = data.to_dataloader(train=False, batch_size=ROWS // options["devices"])
    pl.Trainer(max_epochs=STEPS, **options).fit(module, rows)
    return module


@library("chemprop", "the user's own Trainer")
def chemprop(options: dict[str, Any]) -> nn.Module:
    import lightning.pytorch as pl
    from chemprop import data, models
    from chemprop import nn as parts

    rows = [
        data.MoleculeDatapoint.from_smi("C" * (i % 8 + 1) + "O", [i / ROWS]) for i in range(ROWS)
    ]
    module = models.MPNN(
        parts.BondMessagePassing(d_h=16), parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=16, hidden_dim=16), batch_norm=False,
    )  # fmt: skip
    batches = data.build_dataloader(
        data.MoleculeDataset(rows), ROWS // options["devices"], shuffle=False
    )
    pl.Trainer(max_epochs=STEPS, **options).fit(module, batches)
    return module


@library(
    "mlcolvar", "the user's own Trainer",
    "its loader is none of torch's, so every rank sees all rows, with `ddp` too",
)  # fmt: skip
def mlcolvar(options: dict[str, Any]) -> nn.Module:
    import lightning.pytorch as pl
    from mlcolvar.cvs import RegressionCV
    from mlcolvar.data import DictDataset, DictModule

    x = torch.randn(ROWS, 4)
    module = RegressionCV([4, 8, 1])
    rows = DictModule(
        DictDataset({"data": x, "target": x.square().sum(1)}), lengths=[1.0], batch_size=ROWS
    )
    pl.Trainer(max_epochs=STEPS, limit_val_batches=0, **options).fit(module, rows)
    return module


@library("pina-mathlab", "`pina.Trainer`'s own arguments")
def pina_mathlab(options: dict[str, Any]) -> nn.Module:
    from pina import Trainer
    from pina.model import FeedForward
    from pina.problem.zoo import SupervisedProblem
    from pina.solver import SupervisedSolver

    x = torch.randn(ROWS, 3)
    solver = SupervisedSolver(
        SupervisedProblem(x, x.sum(1, keepdim=True)), FeedForward(3, 1, inner_size=8), use_lt=False
    )
    Trainer(solver, max_epochs=STEPS, batch_size=ROWS // options["devices"], **options).train()
    return solver


@library(
    "gluonts[torch]", "`trainer_kwargs`",
    "its windows are drawn at random, and the weights of the best epoch come back",
)  # fmt: skip
def gluonts(options: dict[str, Any]) -> nn.Module:
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import SimpleFeedForwardEstimator

    rows = [
        {"start": "2026-01-01", "target": table.y} for _, table in series().groupby("unique_id")
    ]
    estimator = SimpleFeedForwardEstimator(
        prediction_length=4, context_length=8, hidden_dimensions=[8], num_batches_per_epoch=1,
        batch_size=ROWS // options["devices"],
        trainer_kwargs={"max_epochs": STEPS, **without(options, "enable_checkpointing")},
    )  # fmt: skip
    return estimator.train_model(ListDataset(rows, freq="D")).trained_net


@library("deeptab", "arguments of `fit`")
def deeptab(options: dict[str, Any]) -> nn.Module:
    import pandas as pd
    from deeptab.configs import MLPConfig
    from deeptab.models import MLPRegressor

    table = pd.DataFrame(torch.randn(ROWS, 3).numpy(), columns=["a", "b", "c"])
    y = table.sum(axis=1).to_numpy()
    model = MLPRegressor(MLPConfig(layer_sizes=[8, 8], dropout=0.0))
    model.fit(
        table, y, X_val=table, y_val=y, max_epochs=STEPS, batch_size=ROWS // options["devices"],
        shuffle=False, random_state=1, **without(options, "enable_checkpointing"),
    )  # fmt: skip
    return model._task_model


@library(
    "scvi-tools", "arguments of `train`",
    f"its latent values are drawn at random; beside `{UNUSED}`, as `ddp` ends in an error", ddp=UNUSED,
)  # fmt: skip
def scvi_tools(options: dict[str, Any]) -> nn.Module:
    import anndata
    import numpy as np
    import scvi

    scvi.settings.seed = 1
    counts = anndata.AnnData(np.random.default_rng(1).poisson(3, (ROWS, 12)).astype(np.float32))
    scvi.model.SCVI.setup_anndata(counts)
    model = scvi.model.SCVI(
        counts,
        n_hidden=8,
        n_latent=2,
        dropout_rate=0.0,
        use_batch_norm="none",
        use_layer_norm="both",
    )
    model.train(
        max_epochs=STEPS, batch_size=ROWS // options["devices"], train_size=1.0,
        shuffle_set_split=False, **options,
    )  # fmt: skip
    return model.trainer.lightning_module
