"""BatchNorm over the batches of all ranks, on a CPU, where torch's ``SyncBatchNorm`` refuses to run.

Two collectives a layer and step, as torch's: one in forward (each rank's count, mean and sum of squared
deviations), one in backward (two sums). The combination is exact for unequal local batches too, and
does not lose digits when means are large.

Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
variances".
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dp.internals.autograd import BatchNorm, check_input_dim


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps)`` over all ranks; the affine part is left to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalised input, and mean, biased variance and count over all ranks.

        Collective: every rank of the default group. Blocks.
        """
        count, mean, squares = _local_moments(x)
        mine = torch.cat([count.reshape(1), mean, squares])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        table = torch.stack(everyone)
        counts, means, sums = torch.split(table, [1, mean.numel(), mean.numel()], dim=1)
        total = counts.sum()
        if total <= 1:
            raise ValueError(
                f"BatchNorm needs more than one value a channel over all ranks when training; got input of"
                f" shape {tuple(x.shape)} on rank {dist.get_rank()}."
            )
        mean = (counts * means).sum(dim=0) / total
        var = (sums + counts * (means - mean).square()).sum(dim=0) / total
        scale = (var + eps).rsqrt()
        normal = ((x.to(mean.dtype) - _wide(mean, x)) * _wide(scale, x)).to(x.dtype)
        ctx.save_for_backward(normal, scale, total)
        ctx.mark_non_differentiable(mean, var, total)
        return normal, mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        """Gradient of all ranks' losses with respect to this rank's input.

        Collective: every rank of the default group. Blocks.
        """
        normal, scale, total = ctx.saved_tensors
        wide, dims = grad.to(scale.dtype), _dims(grad)
        sums = torch.stack([wide.sum(dim=dims), (wide * normal).sum(dim=dims)])
        dist.all_reduce(sums)
        first, second = sums / total
        result = (wide - _wide(first, grad) - normal * _wide(second, grad)) * _wide(scale, grad)
        return result.to(grad.dtype), None


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def _local_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count ``()``, mean ``(C,)`` and sum of squared deviations ``(C,)``; fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = torch.tensor(float(x.numel() // x.shape[1]), dtype=wide.dtype, device=x.device)
    mean = wide.sum(dim=_dims(x)) / count.clamp(min=1)
    return count, mean, (wide - _wide(mean, x)).square().sum(dim=_dims(x))


class Synced:
    """In front of a BatchNorm class: the same layer with statistics over all ranks."""

    unsynced: type[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, shape ``(N, C, ...)``; in training over the batches of all ranks.

        Collective: in training, every rank of the default group, in the order of the layers. ``N`` may
        differ between ranks, and may be 0. Blocks.
        """
        layer = cast(nn.BatchNorm1d, self)
        if not layer.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return cast(Tensor, self.unsynced.forward(layer, x))
        check_input_dim(layer, x)
        normal, mean, var, total = _Normalize.apply(x, layer.eps)  # type: ignore[no-untyped-call]
        if layer.track_running_stats:
            _update(layer, mean, var, total)
        if not layer.affine:
            return cast(Tensor, normal)
        # Multiplied as batch_norm does: in the wider type of input and weight, returned in the input's.
        wide = normal * _wide(layer.weight, x) + _wide(layer.bias, x)
        return cast(Tensor, wide.to(x.dtype))


@torch.no_grad()
def _update(layer: nn.BatchNorm1d, mean: Tensor, var: Tensor, total: Tensor) -> None:
    share = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if share is None:
            share = 1.0 / float(layer.num_batches_tracked)
    unbiased = var * (total / (total - 1))
    for running, now in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        if running is not None:
            running.mul_(1 - cast(float, share)).add_(
                now.to(running.dtype), alpha=cast(float, share)
            )


class SyncBatchNorm1d(Synced, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over all ranks."""

    unsynced = nn.BatchNorm1d


class SyncBatchNorm2d(Synced, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over all ranks."""

    unsynced = nn.BatchNorm2d


class SyncBatchNorm3d(Synced, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over all ranks."""

    unsynced = nn.BatchNorm3d


_KNOWN = {cls.unsynced: cls for cls in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d)}


@cache
def _synced(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _KNOWN:
        return _KNOWN[cls]
    return type(f"Sync{cls.__name__}", (Synced, cls), {"unsynced": cls})


def synchronize_batch_norms(module: nn.Module) -> int:
    """Let every BatchNorm of ``module`` use all ranks' batches; return how many there are.

    Only the class of each layer changes: the layer, its parameters, buffers and hooks stay the same
    objects, so that optimizers and other references to them keep working.
    """
    layers = [m for m in module.modules() if isinstance(m, BatchNorm) and not isinstance(m, Synced)]
    for layer in layers:
        layer.__class__ = _synced(cast(Any, type(layer)))
    return len(layers)


def revert_batch_norms(module: nn.Module) -> None:
    """Give every layer its own class back."""
    for layer in module.modules():
        if isinstance(layer, Synced):
            layer.__class__ = layer.unsynced  # type: ignore[assignment]
