"""A training script as a user would write it; misbehaves as its arguments say. Run by the launch tests.

train.py FOLDER [RANK:MOMENT:HOW] [key=value ...]      RANK may be "all"
"""

import os
import signal
import sys
import threading
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

import lightning_dp

FOLDER, FAULT = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")
OPTIONS = dict(arg.split("=", 1) for arg in sys.argv[3:])
WHO, MOMENT, HOW = FAULT.split(":") if FAULT else ("-1", "", "")


def act():
    if HOW == "raise":
        raise ValueError("boom in user code")
    if HOW == "exit":
        os._exit(3)
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if HOW == "sleep":
        time.sleep(60)
    if HOW == "lost interrupt":
        threading.Thread(target=lost_interrupt).start()
        time.sleep(60)


def lost_interrupt():
    """Ctrl+C as it can arrive between Python's last look and a system call: noted, but it wakes nobody."""
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


class Model(BoringModel):
    began = -1

    def reach(self, moment):
        rank = self.trainer.global_rank
        if (
            moment == MOMENT
            and WHO in (str(rank), "all")
            and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        ):
            act()

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == int(OPTIONS.get("step", 3)):
            print(f"AT rank {self.trainer.global_rank}", flush=True)
            self.reach("train")
            if str(self.trainer.global_rank) != WHO and OPTIONS.get("others") == "sleep":
                time.sleep(60)
        time.sleep(float(OPTIONS.get("pause", 0)))
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        self.began = self.trainer.global_step

    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 64))


def main():
    assert lightning_dp
    checkpoint = ModelCheckpoint(FOLDER, save_last=True, every_n_train_steps=2, save_top_k=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(OPTIONS.get("devices", 2)),
        num_nodes=int(OPTIONS.get("nodes", 1)),
        strategy=OPTIONS.get("strategy", "lean_ddp"),
        max_steps=int(OPTIONS.get("steps", 12)),
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        default_root_dir=FOLDER,
    )
    model = Model()
    try:
        trainer.fit(model, ckpt_path="last")
    finally:
        print(
            f"FINALLY rank {trainer.global_rank} from {model.began} at {trainer.global_step}",
            flush=True,
        )
    print(f"WEIGHTS {[round(float(p.detach().sum()), 6) for p in model.parameters()]}", flush=True)
    if OPTIONS.get("again"):
        trainer.test(model, verbose=False)
        second = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="lean_ddp",
            max_steps=2,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        second.fit(Model())
        print(
            f"SECOND rank {second.global_rank} of {second.world_size} at {second.global_step}",
            flush=True,
        )
    if MOMENT == "after" and str(trainer.global_rank) == WHO:
        sys.exit(4)


if __name__ == "__main__":
    main()
