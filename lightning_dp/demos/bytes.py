"""A small GPT that reads the source text of Python's standard library, byte by byte.

Every Python brings the text along, so nothing is downloaded. Whole files are held out for
validation and testing, and the result is given in bits per byte: how many bits a compressor would
need that used the model to guess the next byte. Guessing blindly takes 8.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dp.internals.lightning import OptimizerLRScheduler, pl

VOCABULARY = 256
Split = Literal["train", "val", "test"]
# Not prose and not code by hand: test data, tables and third-party packages.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
HELD_OUT = 20  # one file in twenty is for validation, another for testing


def split_of(name: str) -> Split:
    """Say what a file is for, from its name alone: the same on every rank and every machine."""
    draw = zlib.crc32(name.encode()) % HELD_OUT
    return "val" if draw == 0 else "test" if draw == 1 else "train"


@lru_cache(maxsize=3)
def read_corpus(split: Split) -> Tensor:
    """Concatenate this interpreter's library files that belong to ``split``.

    Returns:
        Shape ``(num_bytes,)``, dtype uint8. Files are separated by a zero byte.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(name.parts) and split_of(name.as_posix()) == split:
            parts.append(path.read_bytes() + b"\0")
    if not parts:
        raise FileNotFoundError(f"no Python source files for {split!r} under {root}")
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """A text cut into windows that overlap by the one byte which is both target and next input.

    Args:
        text: Shape ``(num_bytes,)``, dtype uint8.
        length: Bytes that a window predicts.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class BytesDataModule(pl.LightningDataModule):
    """Windows of the library's text.

    Args:
        batch_size: Windows in a batch, on each rank.
        length: Bytes that a window predicts.
        num_workers: Worker processes of each loader.
        max_eval_bytes: Validation and testing stop after this many bytes each.
    """

    def __init__(
        self,
        batch_size: int = 16,
        length: int = 128,
        num_workers: int = 0,
        max_eval_bytes: int = 131072,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.length = length
        self.num_workers = num_workers
        self.max_eval_bytes = max_eval_bytes

    def setup(self, stage: str) -> None:
        """Read the files."""
        self.train_set = Windows(read_corpus("train"), self.length)
        self.val_set = Windows(read_corpus("val")[: self.max_eval_bytes + 1], self.length)
        self.test_set = Windows(read_corpus("test")[: self.max_eval_bytes + 1], self.length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Windows in random order."""
        return DataLoader(
            self.train_set, self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Files that are not trained on."""
        return DataLoader(self.val_set, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Other files that are not trained on."""
        return DataLoader(self.test_set, self.batch_size, num_workers=self.num_workers)


class Block(nn.Module):
    """Causal self-attention, then two linear layers, each on normalised input and added to it.

    Args:
        width: Channels.
        num_heads: Attention heads; divides ``width``.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y


class BytesModule(pl.LightningModule):
    """A GPT over bytes.

    Args:
        width: Channels.
        depth: Blocks.
        num_heads: Attention heads of each block.
        length: Longest text that it can read, in bytes.
        lr: Highest learning rate, after warm-up and before the cosine decay.
        weight_decay: As in AdamW, for matrices only.
        warmup_steps: Optimizer steps over which the learning rate rises.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        length: int = 128,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "mlp.2.weight"))
                std = 0.02 / math.sqrt(2 * depth) if into_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes ``(batch, time)`` to scores of the next byte ``(batch, time, 256)``."""
        x = self.embedding(text) + self.position[: text.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores

    def bits_per_byte(self, windows: Tensor) -> Tensor:
        """Mean over ``(batch, time + 1)`` bytes of what each but the first costs, in bits."""
        scores = self(windows[:, :-1])
        nats = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        return nats / math.log(2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy of the next byte."""
        bits = self.bits_per_byte(batch)
        self.log("train/bits_per_byte", bits, prog_bar=True)
        return bits * math.log(2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Bits per byte on files that are not trained on."""
        bits = self.bits_per_byte(batch)
        self.log("val/bits_per_byte", bits, sync_dist=True, prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Bits per byte on files that nothing was chosen by."""
        self.log("test/bits_per_byte", self.bits_per_byte(batch), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the learning rate rises linearly, then falls along a cosine to a tenth."""
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, self.lr, betas=(0.9, 0.95))
        total = max(1, int(self.trainer.estimated_stepping_batches))

        def factor(step: int) -> float:
            warm = min(1.0, (step + 1) / self.warmup_steps)
            return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / total)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
