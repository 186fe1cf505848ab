"""The optimizer's state in shares: cut where it is whole, and whole again for a checkpoint.

A state tensor with the shape of its parameter has an element for each of the parameter's; everything else
(counters) is kept as it is, and equal on all ranks that keep it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import is_dense
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.optim.exchange import MASTER, in_memory_of
from lightning_dp.optim.shares import Share, Shares
from lightning_dp.optim.stored import Entry, Stored

State = dict[str, Any]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Parameters in the order of ``optimizer``'s groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def cut(
    optimizer: Optimizer,
    shares: Shares,
    *,
    loaded: bool = False,
    wide: Collection[torch.dtype] = (),
) -> None:
    """Keep of a whole state what belongs to this rank's shares. Local, idempotent.

    Args:
        optimizer: With a state of its own, or one that :func:`put` put there.
        shares: Who keeps what.
        loaded: It is the latter: also bring it to the parameters' device and type.
        wide: Parameters of these types, of which a rank has shares, keep their state in fp32.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            share = shares.of(parameter)
            if parameter not in optimizer.state:
                continue
            if share is not None and share.is_empty:
                del optimizer.state[parameter]
                continue
            state = optimizer.state[parameter]
            for key, value in state.items():
                own = _own(parameter, share, value)
                if loaded:
                    masters = share is not None and parameter.dtype in wide
                    dtype = torch.float32 if masters else parameter.dtype
                    own = _placed(key, own, parameter, dtype, group)
                state[key] = own


def _own(parameter: Tensor, share: Share | None, value: Any) -> Any:
    """This rank's part of one value of a parameter's state."""
    if share is None or share.is_whole:
        return value.whole() if isinstance(value, Stored) else value
    if isinstance(value, Stored):
        if value.strides == parameter.stride():
            return value.part(share.begin, share.end)
        value = value.whole()
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return share.of(in_memory_of(parameter, value)).clone()


def _placed(key: Any, value: Any, like: Tensor, dtype: torch.dtype, settings: State) -> Any:
    """``value`` as ``Optimizer.load_state_dict`` would have it, in memory of its own."""
    if isinstance(value, dict):
        return {k: _placed(k, each, like, dtype, settings) for k, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(None, each, like, dtype, settings) for each in value)
    if not isinstance(value, Tensor):
        return value
    if key != "step":
        return value.to(like.device, dtype if like.is_floating_point() else value.dtype, copy=True)
    on_device = settings.get("capturable") or settings.get("fused")
    return value.to(like.device, torch.float32) if on_device else value.clone()


def put(optimizer: Optimizer, state: dict[Any, State]) -> None:
    """Give ``optimizer`` a loaded state as it is, to be cut when it is known where. Local.

    Args:
        optimizer: Whose groups were loaded already.
        state: By number of the parameter, as in ``Optimizer.state_dict``. Tensors are not copied; they may
            be mapped from a file, or :class:`Stored`.
    """
    numbered = dict(enumerate(parameters_of(optimizer)))
    optimizer.state.update({numbered.get(n, n): dict(each) for n, each in state.items()})
    # What classes do for states of older versions.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def materialised(state: State) -> State:
    """``state`` with what is still on disk read. Local."""
    return {key: v.whole() if isinstance(v, Stored) else v for key, v in state.items()}


def without_masters(state: State) -> State:
    """``state`` of one parameter, or of all by number, without its masters. Local."""
    return {
        key: without_masters(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if key != MASTER
    }


def entries(label: str, optimizer: Optimizer, shares: Shares) -> Iterator[Entry]:
    """What this rank writes of ``optimizer``'s state, parameter by parameter. Local.

    Args:
        label: Names the optimizer; the same on all ranks.
        optimizer: Between two steps.
        shares: Who keeps what. What every rank has whole is written by rank 0.
    """
    for number, parameter in enumerate(parameters_of(optimizer)):
        if shares.of(parameter) is not None or shares.rank == 0:
            yield from _entry(f"{label}.{number}", parameter, optimizer, shares)


def _entry(label: str, parameter: Tensor, optimizer: Optimizer, shares: Shares) -> Iterator[Entry]:
    """What this rank has of one parameter's state, if it has something."""
    share, state = shares.of(parameter), optimizer.state.get(parameter)
    if not state:
        return
    numel = parameter.numel()
    begin, end = (0, numel) if share is None else (share.begin, share.end)
    whole = end - begin == numel
    shape = parameter.shape if whole else torch.Size([end - begin])
    dense = is_dense(parameter)
    ranges = {
        key: _flat(parameter, value) if whole else value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == shape and dense
    }
    described = None
    if share is None or shares.most(share) == shares.rank:
        keys = {key: ranges[key].dtype if key in ranges else v for key, v in state.items()}
        described = {"shape": parameter.shape, "strides": parameter.stride(), "keys": keys}
    yield Entry(label, begin, numel, ranges, described)


def _flat(parameter: Tensor, value: Tensor) -> Tensor:
    """``value``, of the parameter's shape, as one range in the order of its memory."""
    value = in_memory_of(parameter, value)
    return value.as_strided((value.numel(),), (1,))


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the state tensors that this rank holds."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    )


def whole_state_dict(optimizer: Optimizer, shares: Shares, group: ReplicaGroup) -> dict[str, Any]:
    """Return on rank 0 what ``optimizer.state_dict()`` would be without shares; elsewhere nothing.

    The state is put together on the CPU, bucket by bucket: besides the result, a few times the memory of
    one bucket's is used.

    Args:
        optimizer: Between two steps.
        shares: Who keeps what.
        group: Who takes part.

    Collective: every rank, at the same step. Blocks.
    """
    found = _bring_to_first(optimizer, shares, group)
    if group.rank != 0:
        return {}
    own = optimizer.state
    order = [parameter for parameter in parameters_of(optimizer) if parameter in found]
    other = {key: value for key, value in own.items() if key not in found}
    whole: defaultdict[Any, Any] = defaultdict(dict)
    whole.update({**other, **{parameter: found[parameter] for parameter in order}})
    optimizer.state = whole
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = own


def make_whole(optimizer: Optimizer, shares: Shares, group: ReplicaGroup) -> None:
    """Give every rank the whole state. Collective: every rank. Blocks."""
    found = _bring_to_first(optimizer, shares, group)
    for parameter in parameters_of(optimizer):
        if shares.of(parameter) is None:
            continue
        state = group.broadcast_object(found.get(parameter))
        optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[parameter] = {
                key: value.to(parameter.device)
                if isinstance(value, Tensor) and value.numel() > 1
                else value
                for key, value in state.items()
            }


@torch.no_grad()
def _bring_to_first(
    optimizer: Optimizer, shares: Shares, group: ReplicaGroup
) -> dict[Tensor, State]:
    """Return each parameter's state: on rank 0 all of it, elsewhere what every rank has whole.

    Collective: every rank. Blocks.
    """
    parameters = {str(number): each for number, each in enumerate(parameters_of(optimizer))}
    label_of = {id(parameter): label for label, parameter in parameters.items()}
    found = {
        parameter: optimizer.state[parameter]
        for parameter in parameters.values()
        if parameter in optimizer.state and (group.world_size == 1 or shares.of(parameter) is None)
    }
    for bucket in shares.buckets:
        divided = [bucket.slots[position].param for position in shares.divided(bucket)]
        members = [parameter for parameter in divided if id(parameter) in label_of]
        if not members:
            continue
        mine = [e for p in members for e in _entry(label_of[id(p)], p, optimizer, shares)]
        everyone = group.gather_object(mine, "the optimizer's state, for a checkpoint")
        theirs = [entry for entries in everyone for entry in entries]
        keys = {each.label: each.described["keys"] for each in theirs if each.described is not None}
        for label, described in keys.items():
            found[parameters[label]] = {
                key: _empty(parameters[label], value) if isinstance(value, torch.dtype) else value
                for key, value in described.items()
            }
        for each in theirs:
            parameter = parameters[each.label]
            for key, values in each.ranges.items():
                if keys.get(each.label, {}).get(key) is values.dtype:  # otherwise it is no range
                    whole = _flat(parameter, found[parameter][key])
                    whole[each.begin : each.begin + len(values)] = values
    return found


def _empty(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="cpu")
