"""Every option of the strategy, once: name, type and default are a field, its meaning stands above it.

A room of the package receives its group; :class:`Options` is all of them, and its arguments are those of
the strategy. The check reads the types: a ``Literal`` lists what can be chosen, numbers and times are above
0 (a ``Literal[0]`` beside them: 0 means never). ``conf/strategy/lean_ddp.yaml`` is written from here.

This file is longer than others because it documents every option of the package.
"""

# Types are values here, not text: the check, command lines and config tools read them.
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dp.errors import ConfigError, some_names
from lightning_dp.internals.lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
)

P = ParamSpec("P")


class Checked:
    """A group of options. Making one checks it.

    Raises:
        ConfigError: A value that is not possible.
    """

    def __post_init__(self) -> None:
        """Check every value; lists become tuples."""
        for option in fields(self):  # type: ignore[arg-type]  # groups are dataclasses
            value = getattr(self, option.name)
            check(option.name, value, option.type)
            if option.type == Sequence[str]:
                object.__setattr__(self, option.name, tuple(value))


_Sizes = TypedDict("_Sizes", {"global": int, "micro": int})


class Batch(_Sizes, total=False):
    """Samples per optimizer step over all ranks, samples per rank and micro-batch, micro-batches a step."""

    accumulate: int | Literal["auto"]


class _WireType(TypedDict):
    dtype: Literal["fp32", "bf16", "fp16", "int8"]


class WireOptions(_WireType, total=False):
    """How gradients are written in messages between machines."""

    block: int
    min_bytes: int | Literal[0]
    error_feedback: bool


class Zero(TypedDict, total=False):
    """How the optimizer's state is divided between ranks."""

    gather: Literal["step", "forward"]
    split: Literal["auto", "off"] | Sequence[str]
    gradients: Literal["auto", "own", "all"]
    except_: Sequence[str]
    masters: bool
    format: Literal["plain", "sharded"]


class OuterSGD(TypedDict, total=False):
    """The outer optimizer: SGD on the ranks' mean change."""

    lr: float
    momentum: float | Literal[0]
    nesterov: bool


class _Every(TypedDict):
    every: int


class OuterOptions(_Every, total=False):
    """Local steps of each rank's own, and a meeting after ``every`` of them."""

    optimizer: OuterSGD
    start_after: int | Literal[0]
    fragments: int
    delay: int | Literal[0]
    mix: float | Literal[0]


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Checked):
    """How gradients are averaged and accumulated.

    Args:
        bucket_cap_mb: About how many MiB of gradients make one message, or ``"auto"``: 25 in shared
            memory and on CUDA; otherwise chosen by measuring the first steps and the link, unless the
            Trainer is ``deterministic``.
        wire: What gradients travel as between machines: ``"auto"`` is each gradient's own type, and says
            once what the measured link would gain by another; ``"fp32"``; or rounded to ``"bf16"``,
            ``"fp16"`` or ``"int8"``, summed in fp32. ``float64`` always keeps its own. As a mapping
            ``{"dtype": "int8", "block": 256, "min_bytes": 65536}``: numbers that share a scale, and the
            smallest message that is rounded.
        shared_memory: Ranks that all run on one machine's CPU average gradients through its memory;
            ``False`` sends them over the process group, as between machines.
        deferred: Name patterns of parameters whose gradients are sent last. Needed only where an error
            says so.
        buffers: ``"lazy"`` makes buffers equal before they are used; ``"step"`` sends all of them
            before each step; ``"none"`` never after the start.
        buffer_reduce: Whether running statistics become rank 0's (``"broadcast"``) or the ``"mean"``.
        check_replicas_every_n_steps: Optimizer steps between two proofs that replicas are identical;
            0 for never.
        on_mismatch: ``"raise"`` if they are not, or ``"rebroadcast"`` rank 0's values.
        check_gradients: ``"warn"`` or ``"raise"`` if a rank's gradients are not finite, by name of rank
            and parameter, before they are averaged. Costs one pass over the gradients. With a loss
            scaler (``16-mixed``), which overflows on purpose and skips such steps, only while its scale
            is below 1.
        accum_sync: Average gradients once per accumulation ``"window"``, or after ``"every"``
            micro-batch.
        manual_sync: In manual optimization, average after ``"each_backward"``, or only ``"on_step"``:
            less traffic, but ``.grad`` is this rank's own until the optimizer steps.
        incomplete_window: What becomes of an incomplete accumulation window at an epoch's end: ``"step"``
            with the right scale, ``"carry"`` it over, or ``"drop"`` it.
        mid_window: A checkpoint inside a window: ``"save"`` its partial gradients, or write at the next
            ``"boundary"``.
        outer: Ranks train alone and meet seldom: ``{"every": 50, "optimizer": {"lr": 0.7, "momentum": 0.9,
            "nesterov": True}, "start_after": 0}``: optimizer steps from one meeting to the next, what
            steps then on the mean change of the weights (``lr`` 1 and ``momentum`` 0 average the
            weights), and how many steps reduce gradients first. ``fragments`` of the model meet in
            turns, ``delay`` steps after they were sent, so that the steps hide the sending; ``mix`` is the
            share of its own weights that a rank keeps then.
        batch: ``{"global": 512, "micro": 16, "accumulate": "auto"}``: samples per optimizer step over
            all ranks and nodes, samples per rank and micro-batch; sets ``accumulate_grad_batches``.
        zero: 1 keeps each optimizer's state in equal shares, one a rank (ZeRO stage 1); 0 keeps all of
            it on every rank. Or a mapping: ``gather``: updated parameters are back when the ``"step"``
            ends, or while the next ``"forward"`` runs, each when it is read first; ``split`` is ``"auto"``,
            ``"off"`` (whole tensors only), or names of optimizer classes that update each parameter by
            itself; ``gradients``: a rank gets the means of its ``"own"`` slices only, and zeros elsewhere,
            or of ``"all"`` (half as many bytes more), or the latter where a hook may read them
            (``"auto"``); ``except_`` are patterns of parameter names, or names of optimizer classes, whose
            state stays whole on every rank; ``masters`` updates parameters of half precision in fp32;
            ``format``: rank 0 writes the whole state as ``ddp`` does (``"plain"``), or each rank its part.
    """

    bucket_cap_mb: float | Literal["auto"] = "auto"
    wire: Literal["auto", "fp32", "bf16", "fp16", "int8"] | WireOptions = "auto"
    shared_memory: bool = True
    deferred: Sequence[str] = ()
    buffers: Literal["lazy", "step", "none"] = "lazy"
    buffer_reduce: Literal["broadcast", "mean"] = "broadcast"
    check_replicas_every_n_steps: int | Literal[0] = 1000
    on_mismatch: Literal["raise", "rebroadcast"] = "raise"
    check_gradients: Literal["off", "warn", "raise"] = "off"
    accum_sync: Literal["window", "every"] = "window"
    manual_sync: Literal["each_backward", "on_step"] = "each_backward"
    incomplete_window: Literal["step", "carry", "drop"] = "step"
    mid_window: Literal["save", "boundary"] = "save"
    outer: OuterOptions | None = None
    batch: Batch | None = None
    zero: Literal[0, 1] | Zero = 0


@dataclass(frozen=True, kw_only=True)
class DataOptions(Checked):
    """Which rank sees which sample.

    Args:
        iterable: What to do with an iterable dataset whose ranks get the same data: ``"warn"``,
            ``"error"``, ``"shard"`` it between ranks and workers, or leave it alone (``"off"``).
        uneven_train: Ranks whose training data ends at different steps end in an ``"error"`` that names
            them, or all stop with the first (``"min"``).
        eval_padding: Validation and test count each sample once (``"exact"``), or ``"pad"`` the last
            batches with repeated samples as ``ddp`` does.
        batch_size: A DataLoader's batch size counts ``"per_device"``, or is the ``"global"`` one of all
            ranks together.
        resume: Where an epoch cannot go on because seed or data changed, ``"auto"`` begins it anew and
            says so; ``"strict"`` is an error.
        strict_data: Make an error of what is otherwise a warning: fewer samples than ranks, samplers
            that differ between ranks.
        rank_rng: Random numbers differ between ranks in data loading ``"workers"``, or in ``"all"`` of
            training (dropout, augmentation in the main process).
        gather_predictions: ``trainer.predict`` returns all predictions on every rank, in the order of the
            dataset.
    """

    iterable: Literal["warn", "shard", "off", "error"] = "warn"
    uneven_train: Literal["error", "min"] = "error"
    eval_padding: Literal["exact", "pad"] = "exact"
    batch_size: Literal["per_device", "global"] = "per_device"
    resume: Literal["auto", "strict"] = "auto"
    strict_data: bool = False
    rank_rng: Literal["workers", "all"] = "workers"
    gather_predictions: bool = False


@dataclass(frozen=True, kw_only=True)
class FaultOptions(Checked):
    """How long ranks wait for each other, and what they do when asked to stop.

    Args:
        rendezvous_timeout_s: Seconds to wait at the start for ranks that are missing; they are named.
        error_grace_s: When a rank fails, the others are interrupted; after this many seconds their
            connections are cut, and after as many again they end themselves.
        stall_report_s: Seconds after which a wait for other ranks is reported, with who has not come;
            0 for never.
        preempt_signals: Signals, on any rank, that make all ranks stop at the same step.
        on_preempt: Then write a ``"checkpoint"`` where ``ckpt_path="last"`` finds it (none in a run with
            ``enable_checkpointing=False``) and end with exit code 143; or only ``"stop"``; or ``"ignore"``
            what Lightning does with these signals.
    """

    rendezvous_timeout_s: float = 120.0
    error_grace_s: float = 3.0
    stall_report_s: float | Literal[0] = 30.0
    preempt_signals: Sequence[str] = ("SIGTERM",)
    on_preempt: Literal["checkpoint", "stop", "ignore"] = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class DDPOptions(Checked):
    """What Lightning's own DDPStrategy is built with.

    Args:
        ddp_comm_hook: A hook of ``torch.distributed.algorithms.ddp_comm_hooks``, or any callable with
            the signature of one; works on every backend. In a config of Hydra
            ``{_target_: hydra.utils.get_method, path: FULL.NAME.OF.THE.HOOK}``.
        ddp_comm_state: The hook's state.
        ddp_comm_wrapper: Wraps the hook (``fp16_compress_wrapper``).
        model_averaging_period: With torch's ``PostLocalSGDState``, the old name of ``outer``; warns.
        start_method: How ranks start when nobody else starts them: ``"popen"`` runs the script again;
            ``"fork"``, ``"spawn"`` and ``"forkserver"`` run the Trainer's call in new processes.
        process_group_backend: ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Seconds (or a timedelta) after which a collective gives up.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, or your own.
        checkpoint_io: Set by the Trainer, or your own.
        precision_plugin: Set by the Trainer, or your own.
    """

    ddp_comm_hook: Callable[..., Any] | None = None
    ddp_comm_state: object | None = None
    ddp_comm_wrapper: Callable[..., Any] | None = None
    model_averaging_period: int | None = None
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    process_group_backend: str | None = None
    timeout: timedelta | float | None = 1800.0
    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None


@dataclass(frozen=True, kw_only=True)
class PortedOptions(Checked):
    """What configs of ``ddp`` and of earlier versions say.

    Args:
        find_unused_parameters: Does nothing: unused parameters are always handled, without a traversal
            of the graph.
        static_graph: Does nothing: nothing is assumed about the graph.
        gradient_as_bucket_view: Does nothing: gradients are always views of buckets.
        broadcast_buffers: Does nothing: buffers are made equal when they are used (see ``buffers``).
        check_reduction: Does nothing: every backward is checked.
        tail: Old name of ``incomplete_window``; warns.
        eval_tail: Old name of ``eval_padding``; warns.
        reduce_dtype: Old name of ``wire``; warns.
    """

    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    check_reduction: bool | None = None
    tail: str | None = None
    eval_tail: str | None = None
    reduce_dtype: str | None = None


_EXCLUDED_BY_ZERO = {
    "ddp_comm_hook": "a hook returns whole buckets, and each rank updates its slices of them",
    "outer": "between two meetings every rank updates all of its own parameters",
}
RENAMED = {"tail": "incomplete_window", "eval_tail": "eval_padding", "reduce_dtype": "wire"}


@dataclass(frozen=True, kw_only=True)
class Options(PortedOptions, DDPOptions, FaultOptions, DataOptions, EngineOptions):
    """All options; the last group's come first."""

    def __post_init__(self) -> None:
        """Check every value, and say what an old name is now and what does nothing."""
        for old, new in RENAMED.items():
            if getattr(self, old) is not None:
                self._rename(old, new)
        if hasattr(self.ddp_comm_state, "start_localSGD_iter"):
            self._take_over_local_sgd()
        super().__post_init__()
        for other in _EXCLUDED_BY_ZERO:
            if self.zero and getattr(self, other) is not None:
                raise ConfigError(
                    f"zero={self.zero!r} and {other} exclude each other: {_EXCLUDED_BY_ZERO[other]}."
                    " Drop one of them."
                )
        for name, meaning in meanings().items():
            if meaning.startswith("Does nothing") and getattr(self, name) is not None:
                rank_zero_info(f"lean_ddp: {name} {meaning[0].lower()}{meaning[1:]}")

    def _rename(self, old: str, new: str) -> None:
        value = getattr(self, old)
        if getattr(self, new) not in (value, getattr(Options, new)):
            raise ConfigError(
                f"{old}={value!r} contradicts {new}={getattr(self, new)!r}. Drop {old}."
            )
        # The eighth caller wrote the option; the others are wrappers of Lightning and constructors.
        rank_zero_warn(
            f"lean_ddp: {old} is now {new}: write {new}={value!r}.",
            category=FutureWarning,
            stacklevel=8,
        )
        object.__setattr__(self, new, value)

    def _take_over_local_sgd(self) -> None:
        """Torch's post-local SGD is an outer step that averages."""
        state: Any = self.ddp_comm_state
        every, start = self.model_averaging_period, state.start_localSGD_iter
        if every is None or self.outer is not None:
            raise ConfigError(
                "ddp_comm_state is torch's post-local SGD, which is outer={'every': N, ...} here. Drop it,"
                " ddp_comm_hook and model_averaging_period, and write outer alone."
            )
        averaging = {"lr": 1.0, "momentum": 0}
        outer = {"every": every, "optimizer": averaging, "start_after": start}
        rank_zero_warn(
            f"lean_ddp: torch's post-local SGD is now outer: write outer={outer!r}. Between two averages"
            " each rank trains alone, also those of one machine.",
            category=FutureWarning,
            stacklevel=8,
        )
        for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
            object.__setattr__(self, name, None)
        object.__setattr__(self, "outer", outer)

    def of_ddp(self) -> dict[str, Any]:
        """Arguments for Lightning's DDPStrategy."""
        given = {option.name: getattr(self, option.name) for option in fields(DDPOptions)}
        if isinstance(self.timeout, (int, float)):
            given["timeout"] = timedelta(seconds=self.timeout)
        return given


# The check


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


# For each type what it takes, in words. What is not here (Lightning's classes, hooks) takes anything.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    NoneType: ("None", lambda value: value is None),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number above 0", lambda value: _positive(value) and float(value).is_integer()),
    float: ("a number above 0", _positive),
    str: ("a name", lambda value: isinstance(value, str)),
    timedelta: (
        "a timedelta above 0",
        lambda value: isinstance(value, timedelta) and value > timedelta(0),
    ),
    Sequence[str]: (
        "a list of names",
        lambda value: (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(isinstance(item, str) for item in value)
        ),
    ),
}


def check(name: str, value: Any, kind: Any) -> None:
    """Check that ``value`` is of the type ``kind``.

    Raises:
        ConfigError: Names the option, the value and what is possible.
    """
    wanted = []
    for each in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if is_typeddict(each) and isinstance(value, Mapping):
            return _check_keys(name, value, each)
        words, fits = _takes(each)
        if fits(value):
            return None
        wanted.append(words)
    raise ConfigError(f"{name}={value!r} is not possible; it must be {' or '.join(wanted)}.")


def _takes(kind: Any) -> tuple[str, Callable[[Any], bool]]:
    if get_origin(kind) is Literal:
        choices = get_args(kind)  # False is 0 to Python
        words = " or ".join(map(repr, choices))
        return words, lambda value: value in choices and not isinstance(value, bool)
    if is_typeddict(kind):
        return f"a mapping of {', '.join(get_type_hints(kind))}", lambda _: False
    return _KINDS.get(kind, ("", lambda _: True))


def _check_keys(name: str, value: Mapping[str, Any], kind: Any) -> None:
    hints = get_type_hints(kind)
    unknown = [str(key) for key in value if key not in hints]
    missing = sorted(kind.__required_keys__ - set(value))
    if unknown or missing:
        wrong = f"has no {some_names(unknown)}" if unknown else f"needs {some_names(missing)}"
        raise ConfigError(f"{name} {wrong}; it takes {some_names(list(hints))}.")
    for key in value:
        check(f"{name}.{key}", value[key], hints[key])


# The constructor


def meanings() -> dict[str, str]:
    """What each option means, as one line; read from the groups' docstrings."""
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", _arguments_doc(), re.M | re.S)
    return {name: " ".join(text.split()) for name, text in found}


def _arguments_doc() -> str:
    groups = reversed(Options.__mro__[1:-2])
    return "\n".join((inspect.getdoc(group) or "").partition("Args:\n")[2] for group in groups)


def takes(
    options: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor that takes any ``**arguments`` the signature of ``options``.

    For type checkers and editors by its type, for programs that ask ``inspect`` (command lines, config
    tools) by its ``__signature__``, for people by its docstring.
    """
    parameters = inspect.signature(options).parameters

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([own, *parameters.values()], return_annotation=None)
        init.__signature__ = signature  # type: ignore[attr-defined]
        init.__annotations__ = {name: each.annotation for name, each in parameters.items()}
        init.__doc__ = f"{init.__doc__ or ''}\n\nArgs:\n{_arguments_doc()}"
        return init

    return decorate


def refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for arguments that no option has.

    Args:
        given: Names.
        known: Names that can be meant; those of a subclass too.

    Raises:
        TypeError: Names the argument and the nearest one that exists; where none is near, a few of them.
    """
    taken = [option.name for option in fields(Options)]
    known = [name for name in dict.fromkeys((*known, *taken)) if name not in ("self", "kwargs")]
    for name in given:
        if name in taken:
            continue
        near = get_close_matches(name, known, n=1)
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"It takes {some_names(known)}: see help(lightning_dp.LeanDDPStrategy)."
        )
        raise TypeError(f"LeanDDPStrategy has no argument {name!r}. {hint}")
