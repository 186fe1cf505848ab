"""The grounds that a test runs on: the CPU, one GPU that all ranks share, one GPU a rank.

A test asks for the fixture ``ground`` (or ``each_wire``, ``each_reading``, which include it) and stays one
function: ``run_ranks`` starts its ranks on the ground, where ``torch.get_default_device()`` is the rank's
device, so that a plain ``torch.randn`` or ``nn.Linear`` is made there; a Trainer gets its arguments from
``trainer_options``.

Ranks are forked, also those that use a GPU: CUDA can be used in a child if its parent never did. So the
parent counts devices by NVML, which does not touch the driver's state (Lightning asks torch for that when
it is imported), ``conftest.py`` fails a test that made a CUDA context in the parent, and results come back
on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ground:
    """Where the ranks of a test live.

    Attributes:
        name: Also that of its mark.
        backend: What carries collectives.
        gpus: How many GPUs a rank has for itself; 0.5 stands for one that all ranks share.
    """

    name: str
    backend: str = "gloo"
    gpus: float = 0.0

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.gpus else "cpu"

    def needs(self, world_size: int) -> int:
        """How many GPUs ``world_size`` ranks need."""
        return 0 if not self.gpus else 1 if self.gpus < 1 else world_size

    def device(self, rank: int) -> torch.device:
        """A rank's device."""
        if not self.gpus:
            return torch.device("cpu")
        return torch.device("cuda", 0 if self.gpus < 1 else rank)

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Variables that tell a rank its place; ranks on one GPU appear as hosts of one device each."""
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
        if 0 < self.gpus < 1:
            place |= {"LOCAL_RANK": 0, "NODE_RANK": rank}
        return {name: str(value) for name, value in place.items()}

    def enter(self, rank: int) -> None:
        """Make this process a rank that lives here: what it makes is on its device."""
        if self.gpus:
            torch.cuda.set_device(self.device(rank))
            torch.set_default_device(self.device(rank))

    def trainer_options(self, world_size: int) -> dict[str, Any]:
        """For ``Trainer``."""
        if not self.gpus:
            return {"accelerator": "cpu", "devices": world_size}
        if self.gpus < 1:
            return {"accelerator": "gpu", "devices": [0], "num_nodes": world_size}
        return {"accelerator": "gpu", "devices": world_size}

    def strategy_options(self) -> dict[str, Any]:
        """For a strategy: a backend that is not the device's own is named."""
        return {"process_group_backend": self.backend} if self.gpus else {}


CPU = Ground("cpu")
GPU = Ground("gpu", gpus=0.5)
MULTI_GPU = Ground("multi_gpu", "nccl", gpus=1)
# A world of one: NCCL's and the streams' logic on a single device.
ALONE = Ground("gpu", "nccl", gpus=1)
# Where ranks are started; set by the fixtures.
CURRENT = CPU


def params(**on_cpu: Any) -> list[Any]:
    """Parameters of a fixture: ``(ground, value)`` for each value that varies on the CPU, then the GPUs."""
    cpu = [pytest.param((CPU, value), id=name) for name, value in on_cpu.items()]
    return [
        *cpu,
        pytest.param((GPU, False), id="gpu", marks=pytest.mark.gpu),
        pytest.param((MULTI_GPU, False), id="multi_gpu", marks=pytest.mark.multi_gpu(2)),
    ]


def RunIf(*, min_cuda_gpus: int = 1) -> pytest.MarkDecorator:
    """Run a test only where there are so many GPUs, as Lightning's own suite writes it."""
    return pytest.mark.gpu if min_cuda_gpus == 1 else pytest.mark.multi_gpu(min_cuda_gpus)


def needed_gpus(item: pytest.Item) -> int:
    """How many GPUs a collected test needs: its mark's, or one for each of its ranks if they are more."""
    if mark := item.get_closest_marker("multi_gpu"):
        world_size = getattr(item, "callspec", None) and item.callspec.params.get("world_size", 0)  # type: ignore[attr-defined]
        return max(int(mark.args[0]), int(world_size or 0))
    return 1 if item.get_closest_marker("gpu") else 0


def why_not(gpus: int) -> str:
    """Why a test that needs so many GPUs cannot run here; empty if it can. Makes no CUDA context."""
    found = torch.cuda.device_count()
    if gpus > found:
        return f"needs {gpus} GPU(s), found {found}"
    if gpus and torch.cuda.is_initialized():
        return "this process uses CUDA already, so that its forked ranks cannot"
    if gpus > 1 and not dist.is_nccl_available():
        return "needs NCCL"
    return ""
