"""``ProfileRecorder``: what one rank does in a step, as ``lean-ddp plan`` reads it."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.engine.plan.advice import coding_s_per_byte
from lightning_dp.engine.wires.codec import Codec, Half, Int8
from lightning_dp.errors import ConfigError
from lightning_dp.internals.lightning import Callback, pl
from lightning_dp.internals.trainer import rank_batch_size
from lightning_dp.measure.forecast import RunProfile
from lightning_dp.measure.loopback import measure_loopback

log = logging.getLogger(__name__)

WARM_UP = 5
LEAST, MOST = 5, 200  # steps that are measured
FILE = "profile.json"


class ProfileRecorder(Callback):
    """Measures steps of one rank, stops the training, and writes ``profile.json``.

    When each gradient arrives, how long forward, backward and optimizer take, what the forward keeps, and
    on a CPU what two ranks of this machine cost each other.

    Args:
        seconds: For which steps are measured, after a warm-up.
        dirpath: Where the file goes; the Trainer's ``default_root_dir`` if ``None``.

    Attributes:
        file: Where it was written.
    """

    def __init__(self, seconds: float = 20.0, dirpath: str | Path | None = None) -> None:
        if not seconds > 0:
            raise ConfigError(f"seconds={seconds} is not possible; it must be above 0.")
        self.seconds = seconds
        self.dirpath = dirpath
        self.file: Path | None = None
        self._marks: list[
            tuple[float, float, float, float]
        ] = []  # end before, backward, its end, end
        self._arrivals: dict[str, list[float]] = {}
        self._kept: dict[int, int] = {}  # bytes by storage
        self._steps = 0
        self._end = self._backward = self._reduced = self._began = 0.0
        self._handles: list[Any] = []
        self._watching = contextlib.ExitStack()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch the gradients.

        Raises:
            ConfigError: There are other ranks, or micro-batches: their time would be taken for this one's.
        """
        if trainer.world_size > 1 or trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "a profile is measured on one rank without accumulation. Set trainer.devices=1,"
                " trainer.num_nodes=1 and trainer.accumulate_grad_batches=1; lean-ddp plan adds both."
            )
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._arrived(name))  # type: ignore[no-untyped-call]
            for name, parameter in pl_module.named_parameters()
            if parameter.requires_grad
        ]
        self._end = time.perf_counter()

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        times = self._arrivals.setdefault(name, [])

        def on_gradient(_: Tensor) -> None:
            if self._steps >= WARM_UP:
                times.append(time.perf_counter() - self._backward)

        return on_gradient

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """In one step of the warm-up, look at what the forward keeps."""
        if self._steps == WARM_UP - 1:
            own = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    self._kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            self._watching.enter_context(hooks)

    def on_before_backward(self, *_: Any) -> None:
        """The forward has ended."""
        self._watching.close()
        self._backward = _now()

    def on_after_backward(self, *_: Any) -> None:
        """The backward has ended."""
        self._reduced = _now()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep the step; stop when there are enough."""
        now = _now()
        self._steps += 1
        if self._steps == WARM_UP:
            self._began = now
        elif self._steps > WARM_UP:
            self._marks.append((self._end, self._backward, self._reduced, now))
            enough = now - self._began > self.seconds and len(self._marks) >= LEAST
            trainer.should_stop |= enough or len(self._marks) >= MOST
        self._end = now

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file.

        Raises:
            ConfigError: Training was too short.
        """
        for handle in self._handles:
            handle.remove()
        if len(self._marks) < LEAST:
            raise ConfigError(
                f"training ended after {self._steps} steps, and a profile needs {WARM_UP + LEAST}. Take"
                " more data, or leave trainer.max_steps and trainer.limit_train_batches out."
            )
        folder = Path(self.dirpath or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        on_cpu = pl_module.device.type == "cpu"
        profile = self._profile(trainer, pl_module, measure_loopback() if on_cpu else {})
        self.file = folder / FILE
        profile.save(self.file)
        log.info("lean_ddp: wrote %s: lean-ddp plan %s --ranks 1..64", self.file, self.file)

    def _profile(self, trainer: pl.Trainer, module: nn.Module, link: dict[str, Any]) -> RunProfile:
        steps = [end - before for before, _, _, end in self._marks]
        middle = statistics.median(steps)
        off = statistics.median(abs(step - middle) for step in steps)
        sizes = {
            name: 4 * p.numel() * (1 + p.is_complex()) for name, p in module.named_parameters()
        }
        codecs: list[Codec] = (
            [Half(torch.bfloat16), Int8()] if link else []
        )  # what a processor does
        state = (v for o in trainer.optimizers for s in o.state.values() for v in s.values())
        return RunProfile(
            name=type(module).__name__,
            samples=rank_batch_size(trainer) or 1,
            forward_s=_median(self._marks, 0, 1),
            backward_s=_median(self._marks, 1, 2),
            optimizer_s=_median(self._marks, 2, 3),
            gradients=tuple(
                sorted(
                    (statistics.median(t), sizes[name]) for name, t in self._arrivals.items() if t
                )
            ),
            parameter_bytes=sum(_nbytes(p) for p in (*module.parameters(), *module.buffers())),
            optimizer_bytes=sum(_nbytes(value) for value in state if isinstance(value, Tensor)),
            activation_bytes=sum(self._kept.values()),
            spread=min(0.2, 1.48 * off / middle),
            codec_s_per_byte={codec.name: coding_s_per_byte(codec, 2) for codec in codecs},
            **link,
        )


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a measurement, not a training: what was queued belongs to this part
    return time.perf_counter()


def _median(marks: list[tuple[float, float, float, float]], begin: int, end: int) -> float:
    return statistics.median(mark[end] - mark[begin] for mark in marks)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
