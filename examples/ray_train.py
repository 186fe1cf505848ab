"""Ray Train starts the ranks, and starts them anew when one dies: python examples/ray_train.py.

Needs ``pip install 'lightning_dp[ray]'``. A network is trained on scanned digits, for two epochs each time:
on two ranks without Ray; on two workers of Ray, of which one is killed in the second epoch's midst, so that
Ray starts both anew, from the last checkpoint that was reported; and on three workers from that checkpoint.
It is counted how often each sample was trained.
"""

import argparse
import os
import signal
import time
from collections import Counter
from pathlib import Path

import lightning as L
import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_checkpoint
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

from lightning_dp.ray import RayLeanDDPStrategy

SAMPLES, BATCH, EPOCHS = 432, 8, 2  # 27 steps an epoch on two workers
REPORT_EVERY, DIES_AT = 12, 41  # steps


class Classifier(L.LightningModule):
    """Writes into ``folder`` which samples it was given."""

    def __init__(self, folder, dies=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.folder, self.dies = Path(folder), dies

    def on_train_start(self):
        self.file = self.folder / f"{self.global_step:03d}.rank{self.global_rank}"

    def training_step(self, batch, batch_idx):
        x, y, number = batch
        with self.file.open("a") as file:
            print(self.current_epoch, self.global_step, *number.tolist(), file=file)
        if self.dies and (self.global_rank, self.global_step) == (1, DIES_AT):
            time.sleep(5)  # Ray looks for new reports every 2 s
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Report(RayTrainReportCallback):
    """Reports a checkpoint every few steps too, not only when an epoch ends."""

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step % REPORT_EVERY == 0:
            self.on_train_epoch_end(trainer, module)


def fit(folder, dies=False, path=None, **options):
    L.seed_everything(1)
    digits = load_digits()
    x, y = torch.tensor(digits.data[:SAMPLES] / 16).float(), torch.tensor(digits.target[:SAMPLES])
    data = torch.utils.data.TensorDataset(x, y, torch.arange(SAMPLES))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    if "plugins" in options:
        prepare_trainer(trainer)
    module = Classifier(folder, dies)
    trainer.fit(module, torch.utils.data.DataLoader(data, BATCH, shuffle=True), ckpt_path=path)
    return module


def worker(config):
    """Runs in each of Ray's workers."""
    start = get_checkpoint() or config["start"]  # of this run, once Ray has started it anew
    ray_options = {
        "strategy": RayLeanDDPStrategy(),
        "plugins": [RayLightningEnvironment()],
        "devices": "auto",
        "callbacks": [Report()],
    }
    path = os.path.join(start.path, Report.CHECKPOINT_NAME) if start else None
    dies = config["dies"] and get_checkpoint() is None
    fit(config["folder"], dies, path, **ray_options)


def with_ray(folder, workers, dies=False, start=None):
    folder.mkdir(parents=True)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": str(folder), "dies": dies, "start": start},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder.parent / "ray"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=None),
        ),
    )
    return trainer.fit()


def weights(result):
    path = os.path.join(result.checkpoint.path, Report.CHECKPOINT_NAME)
    return torch.load(path, weights_only=False)["state_dict"]


def starts(files):
    return sorted({int(file.stem) for file in files})


def counts(files):
    """For each epoch: how many samples were trained once, twice, ...

    What a run trained after the checkpoint that the next one began with is lost with it.
    """
    seen = [Counter() for _ in range(EPOCHS)]
    for file in files:
        end = next((start for start in starts(files) if start > int(file.stem)), float("inf"))
        for line in file.read_text().splitlines():
            epoch, step, *numbers = map(int, line.split())
            if step < end:
                seen[epoch].update(numbers)
    times = [Counter(each.values()) for each in seen]
    return [", ".join(f"{n} samples {k} time(s)" for k, n in each.items()) for each in times]


def files(*folders, below=1000):
    return [f for each in folders for f in each.glob("*.rank*") if int(f.stem) < below]


def main(folder):
    folder.mkdir(parents=True)
    (folder / "fork").mkdir()
    forked = fit(folder / "fork", strategy="lean_ddp_fork", devices=2).state_dict()
    told = ["lean_ddp_fork, 2 ranks", *counts(files(folder / "fork"))]
    print(*told, sep=" | ")
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        killed = with_ray(folder / "killed", workers=2, dies=True)
        same = all(torch.equal(weights(killed)[name], forked[name]) for name in forked)
        middle = next(c for c, about in killed.best_checkpoints if about["step"] == 36)
        with_ray(folder / "three", workers=3, start=middle)
        seen = [*files(folder / "killed", below=36), *files(folder / "three")]
    finally:
        ray.shutdown()
    print("Ray, 2 workers, one killed", *counts(files(folder / "killed")), sep=" | ")
    print(f"  the same weights: {same}; started at steps", starts(files(folder / "killed")))
    print("Ray, 3 workers from step 36", *counts(seen), sep=" | ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("outputs/ray_train"))
    main(parser.parse_args().folder.absolute())
