"""Demos and hooks: all ranks hold the same bits after 100 steps. ddp: no hook runs on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.demos.bytes import BytesModule, Windows
from lightning_dp.demos.digits import DigitsModule
from tests.support import grounds
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.trainers import lean, ranks, trainer

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]
STEPS = 100

HOOKS = {
    "none": dict,
    "allreduce": lambda: {"ddp_comm_hook": default_hooks.allreduce_hook},
    "fp16": lambda: {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "bf16 wrapper": lambda: {
        "ddp_comm_hook": default_hooks.allreduce_hook,
        "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
    },
    "power sgd": lambda: {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=10),
    },
    "power sgd, fp16": lambda: {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=10),
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
    "averaging": lambda: {
        "outer": {"every": 4, "optimizer": {"lr": 1.0, "momentum": 0}, "start_after": 10}
    },
    "DiLoCo, bf16 wire": lambda: {"outer": {"every": 5}, "wire": "bf16", "shared_memory": False},
    "bf16 wire": lambda: {"wire": "bf16", "shared_memory": False},
    "int8 wire": lambda: {"wire": {"dtype": "int8", "min_bytes": 0}, "shared_memory": False},
}


def digits():
    images = torch.randn(120, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, torch.arange(120) % 10)
    return DigitsModule(width=4), DataLoader(data, batch_size=4)


def text():
    data = Windows(torch.arange(4000, dtype=torch.uint8) % 97, 8)
    return BytesModule(width=16, depth=1, num_heads=2), DataLoader(data, batch_size=2)


DEMOS = {"digits": digits, "bytes": text}


def _hundred_steps(rank, world_size, port, demo, hook):
    torch.manual_seed(1)
    module, loader = DEMOS[demo]()
    before = [p.detach().clone() for p in module.parameters()]
    strategy = lean(bucket_cap_mb=0.002, check_replicas_every_n_steps=50, **HOOKS[hook]())
    runner = trainer(world_size, port, strategy, max_epochs=-1, max_steps=STEPS)
    buckets = []

    def count():
        buckets.append(len(strategy._engine.reducer.layout.buckets))

    module.on_train_end = count
    runner.fit(module, loader)
    assert runner.global_step == STEPS
    assert buckets[0] > 2, buckets
    assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert_equal_on_all_ranks(module.state_dict())


@pytest.mark.parametrize("demo", DEMOS)
@pytest.mark.parametrize("hook", HOOKS)
def test_replicas_are_bit_identical_after_100_steps(demo, hook):
    """The first and the most intricate one on three ranks, where there are so many devices."""
    three = hook in ("none", "power sgd") and not grounds.why_not(grounds.CURRENT.needs(3))
    ranks(_hundred_steps, 3 if three else 2, demo, hook)
