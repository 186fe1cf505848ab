"""One short training on two ranks, which several tests look at."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multi_process.app.commands import succeed

# Enough to learn something, little enough to wait for.
SHORT = ("trainer.max_epochs=2",)


@dataclass(frozen=True)
class Run:
    """A run's folder and what the terminal showed."""

    folder: Path
    output: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def short_run(tmp_path_factory) -> Run:
    """``lean-ddp train``, typed in an empty folder."""
    cwd = tmp_path_factory.mktemp("lean-ddp")
    output = succeed("lean-ddp", "train", *SHORT, cwd=cwd)
    (folder,) = (cwd / "outputs" / "train").iterdir()
    return Run(folder, output)
