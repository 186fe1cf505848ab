"""A callback that fails once, in the first attempt of a run that torchrun restarts."""

import os

from lightning.pytorch.callbacks import Callback


class FailOnce(Callback):
    """Says where training begins; ends one rank's process at a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_train_start(self, trainer, module):
        print(f"BEGINS rank {trainer.global_rank} at {trainer.global_step}", flush=True)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and trainer.global_step == self.step and trainer.global_rank == self.rank:
            os._exit(7)
