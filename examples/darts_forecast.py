"""A library built on pytorch_lightning, which makes the Trainer itself: python examples/darts_forecast.py.

Needs ``pip install darts``. Nothing of the library knows of this package: the strategy's name is enough.
"""

import numpy as np
import pytorch_lightning as pl
from darts import TimeSeries
from darts.models import NBEATSModel

import lightning_dp  # noqa: F401  (registers the strategy's names)

if __name__ == "__main__":
    t = np.arange(200)
    series = TimeSeries.from_values((np.sin(t / 5) + t / 100).astype(np.float32))
    train, rest = series[:-12], series[-12:]
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=12,
        layer_widths=32,
        num_stacks=4,
        n_epochs=20,
        batch_size=16,  # on each rank
        random_state=1,
        pl_trainer_kwargs={"strategy": "lean_ddp_fork", "accelerator": "cpu", "devices": 2},
    )
    model.fit(train)
    # Forked ranks keep what they predict: forecast in this process, on one device.
    one_device = pl.Trainer(accelerator="cpu", devices=1, logger=False)
    forecast = model.predict(12, trainer=one_device)
    error = np.abs(forecast.values() - rest.values()).mean()
    print(f"mean absolute error of the next 12 values: {error:.3f}")
