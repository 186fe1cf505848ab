"""Your module and your data: here, a line through noisy points."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class LineModule(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.line(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class PointsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.linspace(-1, 1, 256).unsqueeze(1)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, 3 * x + 1 + 0.1 * noise), self.batch_size, shuffle=True)
