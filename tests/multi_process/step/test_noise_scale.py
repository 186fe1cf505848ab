"""``NoiseScale`` in a Trainer: B3 to B6, precisions, clipping, weights, and which runs are refused."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dp import NoiseScale
from lightning_dp.demos.bytes import BytesModule, Windows, read_corpus
from lightning_dp.errors import ConfigError
from tests.support.logs import log_lines
from tests.support.spies import CollectiveSpy
from tests.support.trainers import lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("arithmetic on the host")]

DIM, TRUE, ROWS = 64, 40.0, 2048


class Samples(Dataset):
    """Sample ``i``'s gradient is ``G + z_i``: noise of a variance of 1 in each direction."""

    def __init__(self, rows=ROWS):
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(rows, DIM, generator=generator)
        noise -= noise.mean(0)
        self.rows = math.sqrt(1 / TRUE) + noise

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Line(pl.LightningModule):
    """A linear loss: the gradient of a batch is the mean of its rows, in any precision of autocast."""

    def __init__(self, weigh=False):
        super().__init__()
        self.layer = nn.Linear(DIM, 1, bias=False)
        self.weigh = weigh

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        return {"loss": loss, "loss_weight": len(batch)} if self.weigh else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.0)


class Keeps(Logger):
    """What is logged."""

    name = version = "keeps"

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=40)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


# Each with 16 samples an update.
RUNS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 1e-3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"plugins": scaled},
    "weights": {"weigh": True},
    "accumulated": {"accumulate_grad_batches": 4},
    "zero": {"strategy": {"zero": 1}},
    "zero, clipped": {"strategy": {"zero": 1}, "gradient_clip_val": 1e-3},
    "one in two": {"every_n_steps": 2, "max_steps": 192},
    "wire": {"strategy": {"wire": {"dtype": "bf16", "min_bytes": 1}, "shared_memory": False}},
}


def _fit(rank, world_size, port, names):
    found = {}
    for name in names:
        options = dict(RUNS[name])
        every = options.pop("every_n_steps", 1)
        callback, logger = NoiseScale(decay=0.999, every_n_steps=every), Keeps()
        if "plugins" in options:
            options["plugins"] = [options["plugins"]()]
        module = Line(options.pop("weigh", False))
        batch = 16 // world_size // options.get("accumulate_grad_batches", 1)
        runner = trainer(
            world_size,
            port,
            lean(**options.pop("strategy", {})),
            callbacks=[callback],
            logger=logger,
            log_every_n_steps=16,
            **{"max_steps": 96, **options},
        )
        runner.fit(module, DataLoader(Samples(), batch_size=batch, shuffle=True))
        found[name] = callback.estimate, logger.rows
    return found


@pytest.fixture(scope="module")
def alone():
    return ranks(_fit, 1, ["accumulated"])[0]["accumulated"]


def test_b3_one_number_whatever_clips_scales_weighs_or_accumulates(alone):
    together = ranks(_fit, 2, [*RUNS])
    alone = alone[0]
    found = {name: estimate for name, (estimate, _) in together[0].items()}
    for estimate in [*found.values(), alone]:
        assert estimate.batch == pytest.approx(16)
        assert estimate.low < TRUE < estimate.high
        sd = (estimate.high - estimate.low) / 4
        assert abs(estimate.value - found["plain"].value) < 2 * math.sqrt(2) * sd
    # The same batches, in the same order: the same number.
    for name in ("clipped", "bf16-mixed", "16-mixed", "weights", "zero", "zero, clipped", "wire"):
        assert found[name].value == pytest.approx(found["plain"].value, rel=0.02), name
    assert found["clipped"] == found["plain"]
    assert found["one in two"] != found["plain"]
    assert alone.parts == 4
    assert {name: e for name, (e, _) in together[1].items()} == found


def test_what_is_logged(alone):
    estimate, rows = alone
    steps = [step for step, _ in rows]
    assert steps == list(range(16, 97, 16))
    last = rows[-1][1]
    assert last["lean/noise_scale"] == pytest.approx(estimate.value)
    assert last["lean/noise_scale_low"] < last["lean/noise_scale"] < last["lean/noise_scale_high"]
    assert last["lean/batch_fraction"] == pytest.approx(16 / estimate.value)
    assert last["lean/extra_steps"] == pytest.approx(1 + estimate.value / 16)
    assert last["lean/extra_samples"] == pytest.approx(1 + 16 / estimate.value)
    assert 1 < last["lean/adascale_gain"] < 4


def _traffic(rank, world_size, port):
    """Collectives of a run with the callback and of one without, and operators that take norms."""
    seen = []
    for callbacks in ([], [NoiseScale()], [NoiseScale(every_n_steps=5)]):
        spy = NormSpy()
        runner = trainer(world_size, port, lean(), callbacks=callbacks, max_steps=20)
        with spy:
            runner.fit(Line(), DataLoader(Samples(512), batch_size=4))
        seen.append((dict(spy.ops), dict(spy.calls), spy.norms))
    return seen


class NormSpy(CollectiveSpy):
    def __init__(self):
        super().__init__()
        self.norms = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.norms += func._opname in ("dot", "linalg_vector_norm")
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_b4_no_collective_more_and_nothing_at_all_when_it_is_off():
    for off, on, rare in ranks(_traffic, 2):
        assert on[:2] == rare[:2] == off[:2]
        assert off[2] == 0
        assert on[2] == 2 * 20  # the bucket, and this rank's slice of the average
        assert rare[2] == 2 * 4


class Manual(Line):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def _refused(rank, world_size, port):
    told = []
    for module, options, kwargs in [
        (Manual(), {}, {}),
        (Line(), {"accum_sync": "every"}, {"accumulate_grad_batches": 2}),
        (Line(), {}, {}),
    ]:
        runner = trainer(world_size, port, lean(**options), callbacks=[NoiseScale()], **kwargs)
        with pytest.raises(ConfigError) as caught:
            runner.fit(module, DataLoader(Samples(8), batch_size=2))
        told.append(str(caught.value))
    return told


def test_a_run_without_a_noise_scale_is_refused_at_its_start():
    manual, every, one = ranks(_refused, 1)[0]
    assert "automatic optimization" in manual
    assert "accum_sync='window'" in every
    assert "accumulate_grad_batches=2" in one


def test_with_another_strategy_it_does_nothing():
    callback = NoiseScale()
    runner = pl.Trainer(
        accelerator="cpu", devices=1, callbacks=[callback], logger=False, max_steps=2,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(Line(), DataLoader(Samples(8), batch_size=2))
    assert callback.estimate is None


def _bytes(rank, world_size, port):
    said = log_lines()
    found = []
    callback = NoiseScale(decay=0.9)

    class Marks(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step in (10, 80) and callback.estimate is not None:
                found.append(callback.estimate)

    torch.manual_seed(0)
    module = BytesModule(width=32, depth=1, num_heads=2, length=32, lr=1e-2, warmup_steps=5)
    runner = trainer(
        world_size, port, lean(), callbacks=[callback, Marks()], max_steps=80,
        accumulate_grad_batches=4, limit_val_batches=0,
    )  # fmt: skip
    text = read_corpus("val")  # it is smaller
    runner.fit(module, DataLoader(Windows(text, 32), batch_size=4, shuffle=True))
    return found, said


def test_b6_the_noise_scale_of_the_byte_demo_grows_in_training():
    found, said = ranks(_bytes, 1)[0]
    first, last = found[0], found[-1]
    assert last.value > 3 * first.value
    assert any("the noise scale is" in line for line in said)
