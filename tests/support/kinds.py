"""The kinds of run over which a promise must hold, as one table that tests iterate.

A rule about failures, gradients or errors is tested over ``KINDS``, or over a part of it
(``each_kind(wire="hook")``), not over the one kind that its author thought of::

    @each_kind(first_step=False)
    def test_a_failure_is_told(kind): ...
        kind.apply(monkeypatch)  # before ranks are forked: harnesses use this wire, these reads
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_dp.engine.wires.comm_hook import CommHookWire
from tests.support import parity

Precision = Literal["fp32", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
WireKind = Literal["shared_memory", "group", "hook", "bf16", "int8"]

PRECISIONS: dict[Precision, str] = {  # what Lightning's Trainer calls them
    "fp32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
    "bf16-true": "bf16-true",
    "16-true": "16-true",
}
TRUE: dict[str, torch.dtype] = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
AUTOCAST: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WIRES: tuple[WireKind, ...] = ("shared_memory", "group", "hook", "bf16", "int8")
ROUNDED = ("bf16", "int8")


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of run.

    Attributes:
        precision: As the Trainer means it: of parameters (``true``) or of computation only (``mixed``).
        wire: How gradients travel.
        deferred: Reduced values are read one step late, as on an accelerator.
        inside: In ``training_step`` (a raw or manual backward), else after it (automatic optimization).
        first_step: In a first backward, of which no order is known yet, else after it was learnt.
        namespace: Lightning's package.
    """

    precision: Precision = "fp32"
    wire: WireKind = "group"
    deferred: bool = False
    inside: bool = False
    first_step: bool = False
    namespace: Literal["lightning.pytorch", "pytorch_lightning"] = "lightning.pytorch"

    def __str__(self) -> str:
        parts = [self.precision, self.wire, "deferred" if self.deferred else "at once"]
        parts += ["inside" if self.inside else "outside", "first" if self.first_step else "later"]
        return " ".join([*parts, *(["both packages"] if "_" in self.namespace else [])])

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of parameters and gradients."""
        return TRUE.get(self.precision, torch.float32)

    def convert(self, module: nn.Module) -> nn.Module:
        """``module`` as this precision holds it."""
        return module.to(self.parameters)

    def autocast(self) -> torch.autocast:
        """Around a forward; off unless the precision is mixed."""
        dtype = AUTOCAST.get(self.precision)
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``parity``'s harnesses use this wire and these reads, in ranks forked from here on."""
        monkeypatch.setattr(parity, "WIRE", self.wire if self.wire in parity.CONNECT else "group")
        monkeypatch.setattr(parity, "DEFERRED", self.deferred)

    def harness_options(self) -> dict[str, Any]:
        """For ``parity.Harness`` and ``parity.check``."""
        if self.wire != "hook":
            return {}
        return {"wire": lambda group: CommHookWire(group, default_hooks.allreduce_hook, None)}

    def trainer_options(self) -> dict[str, Any]:
        """For ``Trainer``."""
        return {"precision": PRECISIONS[self.precision]}

    def strategy_options(self) -> dict[str, Any]:
        """For ``LeanDDPStrategy``. ``deferred`` is no option: a test sets it on the engine."""
        hook = {"ddp_comm_hook": default_hooks.allreduce_hook} if self.wire == "hook" else {}
        rounded = {"wire": {"dtype": self.wire, "min_bytes": 0}} if self.wire in ROUNDED else {}
        return {"shared_memory": self.wire == "shared_memory", **hook, **rounded}


KINDS: list[Kind] = [
    Kind(precision, wire, deferred, inside, first_step)
    for precision, wire, deferred, inside, first_step in itertools.product(
        PRECISIONS, WIRES, *[(False, True)] * 3
    )
]


def kinds(**fixed: Any) -> list[Kind]:
    """Rows of the table; ``fixed`` holds an attribute at a value, or at one of a tuple of values.

    An attribute that no row varies over (``namespace``) is set: ``kinds(namespace="pytorch_lightning")``.
    """
    wanted = {name: v if isinstance(v, tuple) else (v,) for name, v in fixed.items()}
    named = wanted.pop("namespace", ("lightning.pytorch",))
    return [
        dataclasses.replace(kind, namespace=namespace)
        for namespace in named
        for kind in KINDS
        if all(getattr(kind, name) in values for name, values in wanted.items())
    ]


def each_kind(sample: int = 1, **fixed: Any) -> pytest.MarkDecorator:
    """Parametrize a test by ``kind`` over ``kinds(**fixed)``; or over every ``sample``-th of them."""
    return pytest.mark.parametrize("kind", kinds(**fixed)[::sample], ids=str)
