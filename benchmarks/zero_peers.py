"""torch's FSDP2 and DeepSpeed as ZeRO-1, in a plain loop: Lightning has a strategy of neither for a CPU.

Without a Trainer around it a step is a little shorter than the others' in the same table.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.models import Job

DEEPSPEED, FSDP2 = "DeepSpeed stage 1", "torch FSDP2, parameters kept"


def why_not(name: str) -> str | None:
    """Why a contender is not run here."""
    absent = name == DEEPSPEED and importlib.util.find_spec("deepspeed") is None
    return "deepspeed is not installed" if absent else None


class Fsdp2:
    """Each layer in shards; parameters are kept after the forward, as in ZeRO-1 and 2."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        stacks = [m for m in net.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        for layer in max(stacks, key=lambda m: sum(p.numel() for p in m.parameters())):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
        self.net, self.optimizer = net, torch.optim.AdamW(net.parameters(), lr=lr)

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> None:
        self.optimizer.zero_grad()
        loss_of(self.net).backward()
        self.optimizer.step()


class DeepSpeed:
    """Its engine around torch's AdamW, over gloo."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        made = torch.optim.AdamW(net.parameters(), lr=lr)
        self.engine, wrapped, *_ = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), optimizer=made, config=config
        )
        self.optimizer = wrapped.optimizer

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> None:
        self.engine.backward(loss_of(self.engine))
        self.engine.step()


PEERS = {DEEPSPEED: DeepSpeed, FSDP2: Fsdp2}


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that this rank has."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(value.nbytes for value in local if torch.is_tensor(value))


def one_loop(
    name: str, module: Job, lr: float, steps: int, warm_up: int, sent: Callable[[], int | None]
) -> tuple[float, float | None, float]:
    """Milliseconds of a step, bytes sent in it, and of state, each of these for a parameter."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parameters = sum(p.numel() for p in module.parameters())
    peer = PEERS[name](module.net, lr)
    walls = []
    begin_sent: int | None = None
    for step in range(warm_up + steps):
        if step == warm_up:
            begin_sent = sent()
        begin = time.perf_counter()
        peer.step(lambda net: net(*module.batch).float().square().mean())
        walls.append(time.perf_counter() - begin)
    last = sent()
    per_step = None
    if begin_sent is not None and last is not None:
        per_step = (last - begin_sent) / steps / parameters
    return (
        1e3 * statistics.median(walls[warm_up:]),
        per_step,
        held(peer.optimizer) / parameters,
    )
