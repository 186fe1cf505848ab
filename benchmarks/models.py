"""The models that are measured: what makes gradients small, many, large or late; and where ranks meet."""

from __future__ import annotations

import socket

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Repeat(Dataset):
    """One sample, again and again: loading costs nothing."""

    def __init__(self, sample, length):
        self.sample, self.length = sample, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.sample


class Job(pl.LightningModule):
    """A network, a fixed batch and plain SGD."""

    def __init__(self, net: nn.Module, batch: tuple[Tensor, ...]):
        super().__init__()
        self.net = net
        self.batch = batch

    def training_step(self, batch, batch_idx):
        return self.net(*batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def loader(self, steps: int) -> DataLoader:
        return DataLoader(Repeat(self.batch, steps), batch_size=None)


class Small(nn.Module):
    """1000 parameters of 64 numbers: what an engine costs per parameter."""

    def __init__(self, parameters=1000):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(8, 8) / 8) for _ in range(parameters)
        )

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def mlp(width=1024, depth=12) -> nn.Module:
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def transformer(width=256, depth=8) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def job(name: str, size: int = 0) -> Job:
    """Return the model called ``name``; the same on every rank.

    Args:
        name: ``small``, ``mlp``, ``transformer``, ``cnn`` or ``gpt``.
        size: For ``small``: how many parameters.
    """
    torch.manual_seed(0)
    if name == "small":
        return Job(Small(size or 1000), (torch.randn(4, 8),))
    if name == "mlp":
        return Job(mlp(), (torch.randn(64, 1024),))
    if name == "transformer":
        return Job(transformer(), (torch.randn(8, 64, 256),))
    if name == "cnn":
        from lightning_dp.demos.digits import DigitsModule

        return Job(DigitsModule().net, (torch.randn(64, 1, 10, 10),))
    if name == "gpt":
        from lightning_dp.demos.bytes import BytesModule

        return Job(BytesModule(), (torch.randint(0, 256, (16, 64)),))
    raise ValueError(f"no model {name!r}")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens to."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
