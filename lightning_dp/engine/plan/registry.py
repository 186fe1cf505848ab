"""Which parameters take part: every floating or complex one, each once, frozen ones too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dp.engine.bucket import Slot
from lightning_dp.errors import ConfigError, some_names
from lightning_dp.internals.autograd import ignored_names


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's parameters without the ignored ones; a tied one under its first name."""
    ignored = ignored_names(module)
    return {name: p for name, p in module.named_parameters() if name not in ignored}


def buffer_owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the buffers without the ignored ones, by name: who has it, under which key.

    A tied one is under its first name. Names, not tensors: an assignment (``self.table = new``) replaces
    the tensor.
    """
    ignored = ignored_names(module)
    known: set[int] = set()
    owners = {}
    for prefix, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if name not in ignored and id(tensor) not in known:
                known.add(id(tensor))
                owners[name] = owner, key
    return owners


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers without the ignored ones; a tied one under its first name."""
    return {name: owner.get_buffer(key) for name, (owner, key) in buffer_owners(module).items()}


def refuse_unusable(parameters: dict[str, nn.Parameter], device: torch.device) -> None:
    """Raise for parameters that no data-parallel engine can hold.

    Raises:
        ConfigError: Names lazy, meta, DTensor or misplaced parameters, and what to do.
    """
    for reason, remedy, test in (
        (
            "are lazy and have no shape yet",
            "run one forward on example data before fit (in `setup` or `configure_model`)",
            nn.parameter.is_lazy,
        ),
        (
            "are DTensors: another parallelism shards them",
            "use the strategy that sharded them, or replicate the module",
            lambda p: isinstance(p, DTensor),
        ),
        (
            "are on the meta device and have no values",
            "materialise them (`module.to_empty`, then load or initialise) before fit",
            lambda p: p.is_meta,
        ),
        (
            f"are not on this rank's device, {device}",
            "let Lightning move the module, or list them in _ddp_params_and_buffers_to_ignore",
            lambda p: not is_on(p, device),
        ),
    ):
        bad = [name for name, p in parameters.items() if test(p)]
        if bad:
            raise ConfigError(f"parameters {some_names(bad)} {reason}; {remedy}.")


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``; one without an index (``cuda``) is any of its type."""
    index = device.index if device.index is not None else tensor.device.index
    return tensor.device.type == device.type and tensor.device.index == index


@dataclass(eq=False)
class Registry:
    """Slots of all parameters seen so far, in order of appearance; numbers never change.

    Attributes:
        module: The user's module.
        device: This rank's device.
        partition_of: Tells by name and parameter which may share a bucket: those with equal numbers.
        sliced: Tells by name and parameter whether its optimizer updates slices of buckets.
    """

    module: nn.Module
    device: torch.device
    partition_of: Callable[[str, nn.Parameter], int]
    sliced: Callable[[str, nn.Parameter], bool]
    slots: list[Slot] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)
    _unplanned: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add_new()

    @property
    def names(self) -> list[str]:
        """Names by slot number."""
        return [slot.name for slot in self.slots]

    def missing(self) -> dict[str, nn.Parameter]:
        """Return parameters of the module that have no slot: added or replaced since the last look."""
        return {
            name: p
            for name, p in named_parameters(self.module).items()
            if id(p) not in self._known and (p.is_floating_point() or p.is_complex())
        }

    def unplanned(self) -> list[Slot]:
        """Slots of which it is not known yet how their gradients travel; usually none, or frozen."""
        self._unplanned = [slot for slot in self._unplanned if not slot.planned]
        return self._unplanned

    def look_again(self) -> None:
        """Optimizers have got other groups: see what that means for parameters without a bucket. Local."""
        for slot in self.unplanned():
            self._give_optimizer(slot)

    def _give_optimizer(self, slot: Slot) -> None:
        slot.partition = self.partition_of(slot.name, slot.param)
        slot.sliced = not slot.expects_sparse and self.sliced(slot.name, slot.param)

    def drop_removed(self) -> list[Slot]:
        """Let go of parameters that the module no longer has; return their slots."""
        present = {id(p) for p in named_parameters(self.module).values()}
        removed = [s for s in self.slots if not s.removed and id(s.param) not in present]
        for slot in removed:
            self._known.discard(id(slot.param))
            slot.let_go()
        return removed

    def add_new(self) -> list[Slot]:
        """Give a slot to each parameter that has none; return the new slots.

        Raises:
            ConfigError: A parameter is lazy, meta, a DTensor or on another device.
        """
        parameters = named_parameters(self.module)
        refuse_unusable(parameters, self.device)
        sparse = {
            id(child.weight)
            for child in self.module.modules()
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
        }
        new = []
        for name, param in self.missing().items():
            slot = Slot(len(self.slots), name, param)
            self._known.add(id(param))
            slot.expects_sparse = id(param) in sparse
            self._give_optimizer(slot)
            self._unplanned.append(slot)
            self.slots.append(slot)
            new.append(slot)
        return new
