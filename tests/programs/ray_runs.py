"""What Ray sees of our ranks: a failure, its data sets, two trials of two ranks each. Prints JSON lines."""

import json
import sys
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import ray
import torch
from ray import train, tune
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_dp.ray import RayLeanDDPStrategy

FOLDER = Path(sys.argv[1]).absolute()
ROWS, SIZE, EPOCHS = 48, 4, 2


class Learner(pl.LightningModule):
    def __init__(self, lr=0.1, fails=False):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(1, 1)
        self.lr, self.fails, self.seen = lr, fails, []

    def training_step(self, batch, batch_idx):
        if self.fails and self.global_rank == 1 and batch_idx == 2:
            raise ValueError("the third batch of rank 1")
        self.seen += [(self.current_epoch, int(i)) for i in batch["id"]]
        return self.net(batch["id"].float()[:, None] / ROWS).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(module, loader):
    trainer = pl.Trainer(
        strategy=RayLeanDDPStrategy(check_replicas_every_n_steps=1),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prepare_trainer(trainer).fit(module, loader)
    told = {"world": trainer.world_size, "weight": module.net.weight.item(), "seen": module.seen}
    name = f"{trainer.global_rank}.json"
    (FOLDER / train.get_context().get_experiment_name() / name).write_text(json.dumps(told))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"id": index}


def plain(config):
    fit(Learner(**config), torch.utils.data.DataLoader(Rows(), SIZE, shuffle=True))


def shards(config):
    fit(Learner(**config), train.get_dataset_shard("train").iter_torch_batches(batch_size=SIZE))


def run(name, loop, config, **options):
    """What the ranks told, and the errors of those that failed."""
    (FOLDER / name).mkdir()
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=str(FOLDER / "ray")),
        **options,
    )
    try:
        trainer.fit()
    except train.TrainingFailedError as error:
        return {rank: repr(each) for rank, each in error.worker_failures.items()}
    ranks = [json.loads(file.read_text()) for file in sorted((FOLDER / name).glob("*.json"))]
    times = Counter(tuple(each) for rank in ranks for each in rank["seen"])
    return {
        "worlds": [rank["world"] for rank in ranks],
        "weights": [rank["weight"] for rank in ranks],
        "samples": len(times),
        "times": sorted(set(times.values())),
    }


def trial(config):
    name = tune.get_context().get_trial_id()
    tune.report({"told": json.dumps(run(name, plain, config))})


def trials():
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.5}),
        param_space={"lr": tune.grid_search([0.1, 0.3])},
        run_config=tune.RunConfig(name="tune", storage_path=str(FOLDER / "ray")),
    )
    results = sorted(tuner.fit(), key=lambda result: result.config["lr"])
    return [json.loads(result.metrics["told"]) for result in results]


def say(what, value):
    print(json.dumps([what, value]), flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False)
    try:
        say("failure", run("failure", plain, {"fails": True}))
        rows = {"train": ray.data.range(ROWS)}
        say("shards", run("shards", shards, {}, datasets=rows))
        say("trials", trials())
    finally:
        ray.shutdown()
