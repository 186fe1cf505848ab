"""``LRScaling``: the learning rate follows the global batch, after a gradual warm-up.

    factor(t) = 1 + (k - 1) * min(1, t),   k = B / base_batch (linear) or its square root,
    t = updates made / updates of the warm-up

Source: Goyal et al. 2017, arXiv 1706.02677 (linear, gradual warm-up from the base rate); Malladi et al.
2022, arXiv 2205.10287 (square root, for Adam and its relatives).

[Note: only while the optimizer computes] A group's ``lr`` is multiplied when its optimizer begins to step
and put back when it has. Schedulers, checkpoints, loggers and the closure of a step see what the user's
own code has set; a scheduler that reads ``group["lr"]`` to write the next one cannot compound the factor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.errors import ConfigError
from lightning_dp.internals.lightning import Callback
from lightning_dp.internals.patch import patched
from lightning_dp.internals.trainer import rank_batch_size
from lightning_dp.options import check

if TYPE_CHECKING:
    from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)

Rule = Literal["linear", "sqrt", "none"]
WARMUP_EPOCHS = 5.0


class ScaledSteps:
    """One optimizer: its learning rates are multiplied while it steps, and its updates are counted.

    Its ``step`` is exchanged, not hooked: torch runs hooks twice where a subclass calls its parent's step,
    and not the later one where a step raises.

    Args:
        optimizer: Of the user.
        factor: Asked at each step.
        count: Called after each.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[], float], count: Callable[[], None]
    ) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._count = count
        self._before: list[tuple[dict[str, Any], float | Tensor]] = []
        step = optimizer.step

        @wraps(step)  # a scheduler looks for the mark that it has left there
        def scaled(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if args:
                args = (self._plain(args[0]), *args[1:])
            elif "closure" in kwargs:
                kwargs = {**kwargs, "closure": self._plain(kwargs["closure"])}
            self._multiply()
            try:
                output = step(*args, **kwargs)
            finally:
                self._restore()
            self._count()
            return output

        self.close = patched(optimizer, "step", MethodType(scaled, optimizer))

    def _plain(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """A closure that runs with the user's own rates."""
        if closure is None:
            return None

        def plain() -> Any:
            self._restore()
            output = closure()
            self._multiply()
            return output

        return plain

    def _multiply(self) -> None:
        factor = self._factor()
        seen: set[int] = set()
        for group in self._optimizer.param_groups:
            lr = group["lr"]
            if isinstance(lr, Tensor):  # it may be part of a captured graph: the object stays
                if id(lr) in seen:  # groups may share one
                    continue
                seen.add(id(lr))
                self._before.append((group, lr.clone()))
                lr.mul_(factor)
            else:
                self._before.append((group, lr))
                group["lr"] = lr * factor

    def _restore(self) -> None:
        while self._before:
            group, lr = self._before.pop()
            if isinstance(lr, Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr


class LRScaling(Callback):
    """Multiplies every learning rate by what the global batch asks for, whatever the scheduler.

    The batch is the loader's, times ranks (1 with ``outer``, where each steps alone), times
    ``accumulate_grad_batches``, also where that changes between epochs. Progress of the warm-up is a share
    of it, counted in updates that were really made, and part of checkpoints: on another number of ranks it
    goes on from the same share. ``lean/lr_factor`` and ``lean/lr`` are logged.

    Args:
        rule: ``"linear"`` (SGD), ``"sqrt"`` (Adam and its relatives) or ``"none"``.
        base_batch: Samples per update for which the module's own learning rate was chosen.
        warmup_epochs: Epochs over which the factor rises from 1; 5 where neither length is given.
        warmup_steps: The same in updates.
        batch: Samples per update over all ranks, where the loader does not tell.

    Raises:
        ConfigError: A value that is not possible, or two that contradict each other.
    """

    def __init__(
        self,
        rule: Rule = "linear",
        base_batch: int = 256,
        warmup_epochs: float | Literal[0] | None = None,
        warmup_steps: int | Literal[0] | None = None,
        batch: int | None = None,
    ) -> None:
        self.rule = rule
        self.base_batch = base_batch
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self.batch = batch
        hints = get_type_hints(LRScaling.__init__)
        for name in ("rule", "base_batch", "warmup_epochs", "warmup_steps", "batch"):
            check(f"lr_scaling.{name}", getattr(self, name), hints[name])
        if warmup_epochs is not None and warmup_steps is not None:
            raise ConfigError(
                f"lr_scaling.warmup_epochs={warmup_epochs} and warmup_steps={warmup_steps} are two lengths"
                " of one warm-up. Set one of them to null."
            )
        self._trainer: pl.Trainer | None = None
        self._steps: list[ScaledSteps] = []
        self._done: list[float] = []  # share of the warm-up, by optimizer
        self._loaded: dict[str, Any] = {}
        self._said: tuple[Any, ...] = ()
        self._logged = -1

    # What is multiplied

    @property
    def global_batch(self) -> int:
        """Samples per update over all ranks.

        Raises:
            ConfigError: The loader does not tell, or tells something else than ``batch``.
        """
        assert self._trainer is not None
        own = rank_batch_size(self._trainer)
        options = getattr(self._trainer.strategy, "options", None)
        alone = getattr(options, "outer", None) is not None  # between two averages of parameters
        ranks = 1 if alone else self._trainer.world_size
        window = self._trainer.accumulate_grad_batches
        if own is None:
            if self.batch is None:
                raise ConfigError(
                    "lr_scaling cannot see how many samples a batch has: the loaders are several, or make"
                    " batches of their own. Give lr_scaling.batch, the samples per update over all ranks."
                )
            return self.batch
        found = own * ranks * window
        if self.batch not in (None, found):
            raise ConfigError(
                f"lr_scaling.batch={self.batch} contradicts the loader: {own} samples x {ranks} rank(s) x"
                f" {window} micro-batch(es) are {found} per update. Leave lr_scaling.batch out."
            )
        return found

    @property
    def target(self) -> float:
        """The factor after the warm-up."""
        ratio = self.global_batch / self.base_batch
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.rule]

    @property
    def warmup_updates(self) -> float:
        """Updates of the whole warm-up, as long as the batch is what it is now.

        Raises:
            ConfigError: It is given in epochs, and an epoch has no length.
        """
        if self.warmup_steps is not None:
            return self.warmup_steps
        epochs = WARMUP_EPOCHS if self.warmup_epochs is None else self.warmup_epochs
        if not epochs:
            return 0.0
        assert self._trainer is not None
        batches = self._trainer.num_training_batches
        if math.isinf(batches):
            raise ConfigError(
                "lr_scaling.warmup_epochs needs epochs, and the training data does not say how long one is."
                " Set lr_scaling.warmup_epochs to null and lr_scaling.warmup_steps to a number of updates."
            )
        return epochs * math.ceil(batches / self._trainer.accumulate_grad_batches)

    def factor(self, optimizer: int = 0) -> float:
        """By what the next update of an optimizer multiplies its learning rates."""
        full, done = self.target, self._done[optimizer] if self.warmup_updates else 1.0
        return 1 + (full - 1) * min(1.0, done) if full > 1 else full  # a smaller rate needs none

    def _count(self, optimizer: int) -> None:
        if self.warmup_updates:
            self._done[optimizer] = min(1.0, self._done[optimizer] + 1 / self.warmup_updates)

    # Life time

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the batch and at the optimizers.

        Raises:
            ConfigError: The rule contradicts the run.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, LRScaling) for callback in callbacks) > 1:
            raise ConfigError(
                "two LRScaling callbacks would multiply each other. Keep one of them."
            )
        for number, each in enumerate(trainer.optimizers):
            if any(group.get("lr") is None for group in each.param_groups):
                raise ConfigError(
                    f"lr_scaling multiplies the lr of each parameter group, and optimizer {number}"
                    f" ({type(each).__name__}) has a group without one. Give it an lr, or drop LRScaling."
                )
        self._trainer = trainer
        done = list(self._loaded.get("done", ()))
        self._done = [
            done[i] if i < len(done) else max(done, default=0.0)
            for i in range(len(trainer.optimizers))
        ]
        self._steps = [
            ScaledSteps(optimizer, partial(self.factor, index), partial(self._count, index))
            for index, optimizer in enumerate(trainer.optimizers)
        ]
        self._say()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what has changed with the accumulation."""
        self._say()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Log what the next update is going to use."""
        step, every = trainer.global_step, max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if not self._steps or step == self._logged or step % every:
            return
        self._logged = step
        first = trainer.optimizers[0].param_groups[0]["lr"]
        factor = self.factor()
        metrics = {"lean/lr_factor": factor, "lean/lr": float(first) * factor}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def on_train_end(self, *_: Any) -> None:
        """Let go of the optimizers."""
        for each in self._steps:
            each.close()
        self._steps = []

    def on_exception(self, *_: Any) -> None:
        """Let go of the optimizers: what is saved now has the user's own rates."""
        self.on_train_end()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The warm-up so far, and under what it was made."""
        if self._trainer is None:
            return {}
        return {
            "done": list(self._done),
            "batch": self.global_batch,
            "ranks": self._trainer.world_size,
            "target": self.target,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the warm-up so far until training starts."""
        self._loaded = dict(state_dict)

    # Words

    def _say(self) -> None:
        """Say what is multiplied, if that is news, and what has changed since the checkpoint."""
        trainer = self._trainer
        assert trainer is not None
        facts = (self.global_batch, self.target, self.warmup_updates)
        if facts == self._said:
            return
        self._said = batch, full, updates = facts
        left = trainer.estimated_stepping_batches - trainer.global_step
        before, self._loaded = self._loaded, {}
        if not trainer.is_global_zero:
            return
        ranks, done = trainer.world_size, min(self._done, default=1.0)
        log.info(
            f"lean_ddp: lr_scaling: {batch} samples per update on {ranks} rank(s), {self.rule} rule from"
            f" {self.base_batch}: learning rates times {full:.4g}"
            + (f", reached after {updates:g} updates." if full > 1 and updates else ".")
        )
        if before and (before["batch"], before["target"]) != (batch, full):
            log.warning(
                f"lean_ddp: lr_scaling: the checkpoint was made with {before['batch']} samples per update"
                f" on {before['ranks']} rank(s), times {before['target']:.4g}; from here on it is {batch}"
                f" on {ranks}, times {full:.4g}. The warm-up goes on at {done:.0%}."
            )
        if full > 1 and (1 - done) * updates > left:
            log.warning(
                f"lean_ddp: lr_scaling: the warm-up needs {(1 - done) * updates:.0f} more updates and"
                f" training has {left:.0f}: the full rate is never reached. Set lr_scaling.warmup_epochs,"
                " or warmup_steps, to less."
            )
