"""What ``outer`` cannot go with, each in one sentence."""

from __future__ import annotations

from torch import nn

from lightning_dp.engine.replicas.sync_batch_norm import Synced
from lightning_dp.errors import ConfigError
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import pl
from lightning_dp.options import EngineOptions, OuterOptions

LR, MOMENTUM = 0.7, 0.9  # DiLoCo's


def check_outer(options: EngineOptions, *, hook: bool) -> None:
    """Look at ``outer`` and at what cannot go with it.

    Raises:
        ConfigError: Says what to change.
    """
    if options.outer is None:
        return
    sgd = options.outer.get("optimizer", {})
    if sgd.get("nesterov") and not sgd.get("momentum", MOMENTUM):
        raise ConfigError(
            "outer.optimizer has nesterov=True and momentum=0. Give it momentum, or drop nesterov."
        )
    _check_streaming(options.outer)
    if hook:
        raise ConfigError(
            "outer and ddp_comm_hook cannot go together: a hook is made for gradients, and meetings send"
            " changes of weights. Drop one of them; wire='bf16' makes meetings smaller."
        )


def _check_streaming(outer: OuterOptions) -> None:
    every, fragments, delay = outer["every"], outer.get("fragments", 1), outer.get("delay", 0)
    if fragments > every:
        raise ConfigError(
            f"outer.fragments={fragments} is more than outer.every={every}: each fragment is sent after a"
            " step of its own. Take fewer fragments, or longer rounds."
        )
    if delay > every // fragments:
        raise ConfigError(
            f"outer.delay={delay} is more than the {every // fragments} step(s) from one fragment to the"
            f" next (every={every}, fragments={fragments}), and one is under way at a time. Lower delay"
            " or fragments."
        )
    if outer.get("mix", 0) >= 1:
        raise ConfigError(
            f"outer.mix={outer['mix']} is not possible: it is the share of its own weights that a rank"
            " keeps at a meeting, below 1."
        )


def refuse_module(module: nn.Module, trainer: pl.Trainer) -> None:
    """Look at what cannot train with few meetings.

    Raises:
        ConfigError: Says what to change.
    """
    synced = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.SyncBatchNorm, Synced))
    ]
    if synced:
        raise ConfigError(
            f"outer and SyncBatchNorm ({synced[0]!r}) cannot go together: it communicates in every"
            " forward. Use BatchNorm (sync_batchnorm=False): its statistics are averaged at each meeting."
        )
    if any(hasattr(optimizer, "train") for optimizer in trainer.optimizers):
        raise ConfigError(
            "outer and a schedule-free optimizer cannot go together: it evaluates with other weights, which"
            " a meeting would not average. Use another optimizer, or drop outer."
        )
    if trainer_seams.averages_weights(trainer):
        raise ConfigError(
            "outer and a callback that averages weights while training (WeightAveraging, EMA, SWA) cannot"
            " go together: between meetings each rank would average weights of its own. Drop one of them."
        )
