"""How gradients travel: the user's hook, shared memory, codes, or as they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.reduction.failure import Supervision
from lightning_dp.engine.wires.codec import Codec, Half, Int8
from lightning_dp.engine.wires.shard import ShardWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.engine.wires.wire import Wire
from lightning_dp.errors import ConfigError
from lightning_dp.options import EngineOptions
from lightning_dp.step.hook_choice import HookChoice

if TYPE_CHECKING:
    from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)

BLOCK = 256
MIN_BYTES = 64 * 1024  # below, a message costs its latency whatever its size


class WireChoice:
    """What the options say of the wire.

    Args:
        options: Checked options.
        hook: The user's communication hook, or none.

    Attributes:
        codec: How gradients are written in messages; ``None`` sends them as they are.

    Raises:
        ConfigError: Values that are not possible, or not together.
    """

    def __init__(self, options: EngineOptions, hook: HookChoice) -> None:
        given = options.wire if isinstance(options.wire, Mapping) else {"dtype": options.wire}
        name = given["dtype"]
        self._asked = name
        self._hook = hook
        self._options = options
        self._min_bytes = int(given.get("min_bytes", MIN_BYTES))
        self.codec = _codec(str(name), int(given.get("block", BLOCK)))
        if given.get("error_feedback"):
            raise ConfigError(
                "wire.error_feedback=True is not possible. Measured, feedback makes Adam-like optimizers"
                " worse, and helps SGD only at two bits a number or fewer, which no wire here has. Drop it."
            )
        if self.codec is not None and hook.given:
            raise ConfigError(
                f"wire={name!r} and ddp_comm_hook both say what gradients travel as. Drop one of them;"
                " wire='bf16' is torch's bf16_compress_hook with sums in fp32."
            )

    def connect(
        self,
        group: ReplicaGroup,
        trainer: pl.Trainer,
        timeout: timedelta | None,
        supervision: Supervision,
        *,
        gathers: bool = True,
    ) -> Wire | None:
        """Make the wire; ``None`` is one all-reduce a bucket.

        Without ``gathers`` a rank needs the means of its own slices only.

        Raises:
            ConfigError: Ranks ask for different wires.

        Collective: every rank. Blocks.
        """
        block = self.codec and self.codec.block
        asked = {"dtype": self._asked, "block": block, "min_bytes": self._min_bytes}
        group.refuse_difference("wire", asked)
        wire: Wire | None = self._hook.wire(group, trainer)
        if wire is not None:
            return wire
        speaks = group.rank == 0
        if self._options.shared_memory:
            wire = SharedMemoryWire.connect(group, timeout)
        if wire is not None:
            if speaks:
                log.info("lean_ddp: all ranks share one machine: gradients go through its memory.")
            if speaks and self.codec is not None:
                log.info(
                    "lean_ddp: wire=%s has no effect there: gradients are averaged as they are. With"
                    " shared_memory=False they are sent, and rounded.",
                    self.codec.name,
                )
            return wire
        if (self.codec is None and gathers) or not group.reduces:
            return None
        with supervision.connecting():
            return ShardWire.connect(
                group, timeout, codec=self.codec, min_bytes=self._min_bytes, gathers=gathers
            )


def _codec(name: str, block: int) -> Codec | None:
    if block < 16 or block & (block - 1):
        raise ConfigError(
            f"wire.block={block} is not possible; as many numbers share a scale: a power of two from 16."
        )
    if name == "int8":
        return Int8(block)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return Half(halves[name]) if name in halves else None
