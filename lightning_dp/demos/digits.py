"""Scanned digits: a small convolutional network with BatchNorm on the 1797 scans of scikit-learn.

The scans come with scikit-learn: nothing is downloaded. Each has 8 by 8 pixels of 17 grey levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_dp.internals.lightning import OptimizerLRScheduler, pl

NUM_CLASSES = 10
MAX_GREY = 16.0
Batch = tuple[Tensor, Tensor]


class ShiftedDigits(Dataset[Batch]):
    """Training scans, each moved by up to one pixel, differently every time it is read.

    Args:
        images: Shape ``(n, 1, 8, 8)``.
        labels: Shape ``(n,)``, integers.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = nn.functional.pad(images, (1, 1, 1, 1))
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        top, left = torch.randint(0, 3, (2,)).tolist()
        return self.images[index, :, top : top + 8, left : left + 8], self.labels[index]


class DigitsDataModule(pl.LightningDataModule):
    """60 % of the scans for training, 20 % for validation, 20 % for testing, all classes alike.

    Args:
        batch_size: Scans in a batch, on each rank.
        num_workers: Worker processes of each loader.
        split_seed: Decides which scan goes where.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Read the scans and split them."""
        scans = load_digits()
        images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / MAX_GREY
        labels = torch.tensor(scans.target, dtype=torch.long)
        train, rest = train_test_split(
            range(len(labels)),
            train_size=0.6,
            stratify=scans.target,
            random_state=self.split_seed,
        )
        val, test = train_test_split(
            rest, train_size=0.5, stratify=scans.target[rest], random_state=self.split_seed
        )
        self.train_set = ShiftedDigits(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])
        self.test_set = TensorDataset(images[test], labels[test])

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled and slightly moved scans."""
        return DataLoader(
            self.train_set, self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """Scans that choose the checkpoint."""
        return DataLoader(self.val_set, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        """Scans that nothing was chosen by."""
        return DataLoader(self.test_set, self.batch_size, num_workers=self.num_workers)


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class DigitsModule(pl.LightningModule):
    """Three convolutions with BatchNorm and a linear layer; accuracy and a confusion matrix.

    Args:
        width: Channels of the first convolution; the later ones have twice and four times as many.
        lr: Highest learning rate of the one-cycle schedule.
        weight_decay: As in AdamW.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, weight_decay: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.net = nn.Sequential(
            _block(1, width),
            _block(width, 2 * width),
            nn.MaxPool2d(2),
            _block(2 * width, 4 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width * 4, NUM_CLASSES),
        )
        self.train_acc = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_acc = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_acc = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.confusion = MulticlassConfusionMatrix(NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map scans ``(n, 1, 8, 8)`` to scores ``(n, 10)``."""
        scores: Tensor = self.net(images)
        return scores

    def score(self, batch: Batch, accuracy: MulticlassAccuracy) -> tuple[Tensor, Tensor]:
        """Scores and cross-entropy of one batch, which counts in ``accuracy``."""
        images, labels = batch
        scores = self(images)
        accuracy(scores, labels)
        return scores, nn.functional.cross_entropy(scores, labels)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        _, loss = self.score(batch, self.train_acc)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy on scans that are not trained on."""
        _, loss = self.score(batch, self.val_acc)
        self.log("val/loss", loss, sync_dist=True, prog_bar=True)
        self.log("val/acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss, accuracy and which digit was taken for which."""
        scores, loss = self.score(batch, self.test_acc)
        self.confusion.update(scores, batch[1])
        self.log("test/loss", loss, sync_dist=True)
        self.log("test/acc", self.test_acc)

    def on_test_epoch_end(self) -> None:
        """Draw the confusion matrix beside the other results of the run."""
        self.confusion.compute()  # over all ranks, so every rank has to come here
        folder = self.trainer.log_dir  # a broadcast, so every rank again
        if self.trainer.is_global_zero and self.logger is not None and folder is not None:
            import matplotlib.pyplot as plt  # takes a second, which other ranks need not wait

            figure, _ = self.confusion.plot(cmap="Blues")
            figure.savefig(Path(folder) / "confusion.png", dpi=120)
            plt.close(figure)
        self.confusion.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely digit of each scan, shape ``(n,)``."""
        scores: Tensor = self(batch[0])
        return scores.argmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a one-cycle schedule over all steps of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=max(1, int(self.trainer.estimated_stepping_batches))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
