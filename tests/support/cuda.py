"""What tests of a GPU measure with: slow work on a stream, times by events, kernels by the profiler."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_dp.engine.group import ReplicaGroup
from tests.support.parity import Harness


def delay(ms: float = 50.0) -> None:
    """Keep the current stream busy for about so long; the host goes on."""
    torch.cuda._sleep(int(ms * 1e6))  # cycles: a GPU makes 1 to 2 in a nanosecond


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward keeps its stream busy before the gradient is there."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        delay()
        return grad * 1.0


def forced(module: nn.Module, **options) -> Harness:
    """A harness that reduces whatever the number of ranks."""
    group = ReplicaGroup.create(torch.get_default_device(), alone=True)
    return Harness(module, group=group, **options)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """While in this context, an operation that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds(run: Callable[[], object], repeats: int = 20, warm_up: int = 5) -> float:
    """The median time of ``run`` on the device, by events."""
    times = []
    for number in range(warm_up + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= warm_up:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernels(run: Callable[[], object]) -> int:
    """How many kernels and copies ``run`` queues."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
