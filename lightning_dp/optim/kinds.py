"""How an optimizer's work can be divided: by elements, by whole tensors, or not at all.

[Note: two locks] An optimizer that updates each element by itself works as well on a flat slice of a
parameter as on the whole. Whether it does can be asked: the same steps on a tensor whole and in two
halves. A few optimizers pass that though they are not elementwise (what they do to a whole matrix begins
later, or is triggered by rare gradients). So the question is only put to classes that are known, and a
class that is known is asked nevertheless: hyper-parameters and subclasses change what it does.

Source: the state in shares is ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.engine.bucket import is_dense

STEPS = 20
SHAPE = (8, 12)
TOLERANCE = 1e-6


class Sharding(enum.Enum):
    """How ranks divide the work of a step."""

    SLICES = "slices"  # each rank updates an equal flat slice of every bucket
    TENSORS = "tensors"  # each rank updates the tensors that it owns
    REPLICATED = "replicated"  # each rank updates everything


@dataclass(frozen=True)
class Verdict:
    """What is done with one optimizer.

    Attributes:
        sharding: How its work is divided.
        reason: Why it is not divided; empty where it is.
    """

    sharding: Sharding
    reason: str = ""


_ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"),
    )
)
_BY_TENSOR: frozenset[type] = frozenset(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)
# Of other packages, which are not imported to compare classes.
_ELEMENTWISE_NAMES = frozenset(
    {
        *("AdEMAMix", "Adan", "AdaBelief", "Lion", "Tiger"),
        *("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"),
    }
)
_BY_TENSOR_NAMES = frozenset(
    {
        *("Adalite", "CAME", "LAMB", "LARS", "Lamb", "Lars", "NovoGrad", "SOAP", "Shampoo"),
        *("SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam", "StableAdamW"),
    }
)


def judge(
    optimizer: Optimizer,
    split: Collection[str] = (),
    *,
    slices: bool = True,
    masters: bool = False,
) -> Verdict:
    """Say how the work of ``optimizer`` can be divided ([Note: two locks]).

    It is asked on a copy with its own hyper-parameters; it and its parameters stay as they are, and so do
    random numbers. Takes milliseconds.

    Args:
        optimizer: As the user made it.
        split: Names of classes that are known besides.
        slices: Whether parameters may be cut; without, whole tensors only.
        masters: Whether there is something to divide even if it keeps no state itself.
    """
    cls = type(optimizer)
    name = cls.__name__
    elementwise = cls in _ELEMENTWISE or name in _ELEMENTWISE_NAMES or name in split
    if not (elementwise or cls in _BY_TENSOR or name in _BY_TENSOR_NAMES):
        return Verdict(
            Sharding.REPLICATED,
            f"whether {name} can update a part of the parameters alone is not known; if it updates each"
            f" by itself, say zero={{'split': [{name!r}]}}",
        )
    with torch.random.fork_rng(devices=[]):
        probes = [_Probe(optimizer, group) for group in _different(optimizer.param_groups)]
        if not all(probe.works for probe in probes):
            return Verdict(Sharding.REPLICATED, f"{name} could not be tried on a small tensor")
        if not masters and not any(probe.keeps_state for probe in probes):
            return Verdict(
                Sharding.REPLICATED, f"{name} keeps no state here: there is no memory to save"
            )
        if slices and elementwise and all(probe.is_elementwise() for probe in probes):
            return Verdict(Sharding.SLICES)
        if all(probe.is_by_tensor() for probe in probes):
            return Verdict(Sharding.TENSORS)
    return Verdict(
        Sharding.REPLICATED, f"what {name} does to one parameter depends on the others as well"
    )


def of_parameter(sharding: Sharding, parameter: Tensor) -> Sharding:
    """How the work on one parameter is divided, by an optimizer whose work is divided so."""
    if parameter.numel() == 0 or not is_dense(parameter):
        return Sharding.REPLICATED
    # Optimizers look at a complex number as two real ones, which a slice might part.
    by_slices = sharding is Sharding.SLICES and not parameter.is_complex()
    return sharding if by_slices or sharding is Sharding.REPLICATED else Sharding.TENSORS


def _scalars(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _different(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that have parameters, one of each kind of settings."""
    filled = [group for group in groups if group["params"]]
    return list({repr(_scalars(group)): group for group in filled}.values())


class _Probe:
    """Steps of one group's optimizer on small tensors."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        # In the state of the largest one a counter cannot be taken for something else.
        like: Tensor = max(group["params"], key=Tensor.numel)
        self._like = like
        real = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn(STEPS + 1, *SHAPE, generator=generator, dtype=real, device="cpu")
        self._start, *self._grads = draw.to(like.device)
        self._whole = self._try([self._start], [[grad] for grad in self._grads])

    @property
    def works(self) -> bool:
        return self._whole is not None

    @property
    def keeps_state(self) -> bool:
        """Whether it keeps more than a few numbers for a tensor."""
        assert self._whole is not None
        _, _, states = self._whole
        return any(value.numel() > 1 for state in states for value in _tensors(state))

    def is_elementwise(self) -> bool:
        """Whether two halves, each alone, end where the whole does."""
        assert self._whole is not None
        (whole,), settings, states = self._whole
        if any(not _fits(value, whole) for state in states for value in state.values()):
            return False
        middle = whole.numel() // 2
        halves = []
        for place in (slice(None, middle), slice(middle, None)):
            grads = [[grad.flatten()[place].clone()] for grad in self._grads]
            half = self._try([self._start.flatten()[place].clone()], grads)
            if half is None or not _same(half[1], settings):
                return False
            halves.extend(half[0])
        return _near(torch.cat(halves), whole.flatten())

    def is_by_tensor(self) -> bool:
        """Whether a tensor ends in the same place when another one has no gradient on this rank."""
        start = [self._start, self._start.flip(0).clone()]
        pairs = [[grad, grad.flip(1).clone()] for grad in self._grads]
        both = self._try(start, pairs)
        if both is None:
            return False
        for place in (0, 1):
            alone = self._try(
                start, [[g if n == place else None for n, g in enumerate(pair)] for pair in pairs]
            )
            if alone is None or not _same(alone[1], both[1]):
                return False
            if not _near(alone[0][place], both[0][place]):
                return False
        return True

    def _try(
        self, start: list[Tensor], grads: list[list[Tensor | None]] | list[list[Tensor]]
    ) -> tuple[list[Tensor], dict[str, Any], list[dict[str, Any]]] | None:
        """Return where tensors end, the group's settings then, and the state; ``None`` if it raises."""
        try:
            parameters = [nn.Parameter(tensor.clone()) for tensor in start]
            copy: Any = self._copy(parameters)
            if hasattr(copy, "train"):  # a schedule-free optimizer steps in that mode only
                type(copy).train(copy)
            for step in grads:
                for parameter, grad in zip(parameters, step, strict=True):
                    parameter.grad = None if grad is None else grad.clone()
                type(copy).step(copy)
        except Exception:  # whatever a foreign class raises for tensors of this shape
            return None
        states = [dict(copy.state.get(parameter, {})) for parameter in parameters]
        return [p.detach() for p in parameters], _scalars(copy.param_groups[0]), states

    def _copy(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return an optimizer of the same class and settings over ``parameters``, without hooks."""
        copy: Optimizer = object.__new__(type(self._optimizer))
        for key, value in vars(self._optimizer).items():
            if key != "step":  # a scheduler's wrapper
                vars(copy)[key] = OrderedDict() if key.endswith("_hooks") else value
        settings = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in _scalars(self._group).items()
        }
        copy.param_groups = [{**settings, "params": parameters}]
        copy.state = defaultdict(dict)
        made = self._optimizer.state.get(self._like)
        if made:  # some classes make it in their constructor
            for parameter in parameters:
                copy.state[parameter] = _like(made, self._like, parameter)
        return copy


def _like(state: dict[str, Any], owner: Tensor, parameter: Tensor) -> dict[str, Any]:
    """A state of ``owner`` for ``parameter``: what has an element for each gets the first one's value."""
    return {
        key: torch.full_like(parameter, value.flatten()[0].item(), dtype=value.dtype)
        if isinstance(value, Tensor) and value.shape == owner.shape
        else (value.clone() if isinstance(value, Tensor) else value)
        for key, value in state.items()
    }


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    """Tensors in ``state``, also those in lists and dicts."""
    found: list[Tensor] = []
    todo: list[Any] = list(state.values())
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)
    return found


def _fits(value: Any, parameter: Tensor) -> bool:
    """Whether a slice of ``parameter`` can have such a value in its state."""
    if isinstance(value, Tensor):
        return value.shape == parameter.shape or value.numel() == 1
    return value is None or isinstance(value, (bool, int, float))


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return repr(a) == repr(b)
