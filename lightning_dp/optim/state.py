"""The optimizer's state in shares: cut where it is whole, and whole again for a checkpoint.

A state tensor with the shape of its parameter has an element for each of the parameter's; everything else
(counters) is kept as it is, and equal on all ranks that keep it.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Bucket, is_dense
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.optim.exchange import MASTER, in_memory_of
from lightning_dp.optim.shares import Share, Shares
from lightning_dp.optim.stored import Entry, Stored

State = dict[str, Any]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Parameters in the order of ``optimizer``'s groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_elementwise(value: Any, share: Share) -> bool:
    return isinstance(value, Tensor) and value.shape == share.slot.param.shape


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
    if not _is_elementwise(value, share):
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
        share, state = shares.of(parameter), optimizer.state.get(parameter)
        if not state or (share is None and shares.rank != 0):
            continue
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
        yield Entry(f"{label}.{number}", begin, numel, ranges, described)


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

    The state is put together on the CPU, bucket by bucket: besides the result, one bucket's worth of
    memory is used.

    Args:
        optimizer: Between two steps.
        shares: Who keeps what.
        group: Who takes part.

    Collective: every rank, at the same step. Blocks.
    """
    found = _Assembly(optimizer, shares, group).run()
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
    found = _Assembly(optimizer, shares, group).run()
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


class _Assembly:
    """One optimizer's state on its way to rank 0."""

    def __init__(self, optimizer: Optimizer, shares: Shares, group: ReplicaGroup) -> None:
        self._optimizer = optimizer
        self._shares = shares
        self._group = group
        self._members = {id(parameter) for parameter in parameters_of(optimizer)}
        self._found: dict[Tensor, State] = {}

    @torch.no_grad()
    def run(self) -> dict[Tensor, State]:
        """Return the state of all parameters that have one; on rank 0 it is whole."""
        with self._group.waiting("the optimizer's state, for a checkpoint"):
            self._keep_own()
            for bucket in self._shares.buckets:
                positions = [
                    n
                    for n in self._shares.divided(bucket)
                    if id(bucket.slots[n].param) in self._members
                ]
                if positions and bucket.sliced:
                    self._gather_slices(bucket, positions)
                else:
                    for position in positions:
                        self._move_tensor(bucket, position)
        return self._found

    def _keep_own(self) -> None:
        """Take what every rank has whole: what is not divided."""
        for parameter in parameters_of(self._optimizer):
            alone = self._group.world_size == 1 or self._shares.of(parameter) is None
            if alone and parameter in self._optimizer.state:
                self._found[parameter] = self._optimizer.state[parameter]

    def _own(self, bucket: Bucket, position: int) -> tuple[Share, State]:
        share = self._shares.of_rank(bucket, position, self._group.rank)
        return share, self._optimizer.state.get(share.slot.param, {}) if not share.is_empty else {}

    def _gather_slices(self, bucket: Bucket, positions: list[int]) -> None:
        """Bring one sliced bucket's state to rank 0, key by key."""
        mine = [self._describe(*self._own(bucket, position)) for position in positions]
        described: dict[int, dict[str, Any]] = {}
        # The word of the rank with most of it counts: of one element it cannot be told what it is.
        longest: dict[int, int] = {}
        for theirs in self._group.all_gather_object(mine):
            for position, (length, keys) in zip(positions, theirs, strict=True):
                if keys and length > longest.get(position, 0):
                    longest[position], described[position] = length, keys
        wanted = dict.fromkeys(
            (key, value)
            for keys in described.values()
            for key, value in keys.items()
            if isinstance(value, torch.dtype)
        )
        for position, keys in described.items():
            parameter = bucket.slots[position].param
            self._found[parameter] = {
                key: torch.empty_like(parameter, dtype=value, device="cpu")
                if isinstance(value, torch.dtype) and self._group.rank == 0
                else value
                for key, value in keys.items()
            }
        for key, dtype in wanted:
            concerned = [n for n in positions if described.get(n, {}).get(key) is dtype]
            self._gather_key(bucket, concerned, key, dtype)

    @staticmethod
    def _describe(share: Share, state: State) -> tuple[int, dict[str, Any]]:
        """The share's length; for each key its dtype, if it has an element for each, or its value."""
        length = share.end - share.begin
        shape = share.slot.param.shape if share.is_whole else (length,)
        return length, {
            key: value.dtype
            if isinstance(value, Tensor) and value.shape == shape
            else (value.detach().cpu() if isinstance(value, Tensor) else value)
            for key, value in state.items()
        }

    def _gather_key(self, bucket: Bucket, positions: list[int], key: str, dtype: Any) -> None:
        ranges = [
            [self._shares.of_rank(bucket, n, rank) for n in positions]
            for rank in range(self._group.world_size)
        ]
        longest = max(sum(each.end - each.begin for each in theirs) for theirs in ranges)
        mine = torch.zeros(longest, dtype=dtype, device="cpu")
        place = 0
        for share in ranges[self._group.rank]:
            length = share.end - share.begin
            if length:
                state = self._optimizer.state[share.slot.param][key]
                mine[place : place + length] = _range_of(share, state)
            place += length
        parts = self._to_first(mine)
        if self._group.rank != 0:
            return
        for theirs, part in zip(ranges, parts, strict=True):
            place = 0
            for share in theirs:
                length = share.end - share.begin
                target = self._found[share.slot.param][key]
                share.of(in_memory_of(share.slot.param, target)).copy_(part[place : place + length])
                place += length

    def _to_first(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor on rank 0, nothing elsewhere."""
        group = self._group
        if group.world_size == 1:
            return [mine]
        first = group.rank == 0
        parts = [torch.empty_like(mine) for _ in range(group.world_size)] if first else []
        work = dist.gather(
            mine, parts or None, group=group.control_group, group_dst=0, async_op=True
        )
        interruptible_wait(work)
        return parts

    def _move_tensor(self, bucket: Bucket, position: int) -> None:
        """Bring the state of a tensor from its owner to rank 0: objects of any kind."""
        slot, group = bucket.slots[position], self._group
        owner = self._shares.owner(slot)
        if group.rank == owner:
            state = self._optimizer.state.get(slot.param, {})
            if owner == 0:
                if state:
                    self._found[slot.param] = state
                return
            file = io.BytesIO()
            torch.save(state, file)
            data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
            self._send(torch.tensor([data.numel()], device="cpu"))
            self._send(data)
        elif group.rank == 0:
            size = self._receive(torch.zeros(1, dtype=torch.int64, device="cpu"), owner)
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            file = io.BytesIO(self._receive(data, owner).numpy().tobytes())
            state = torch.load(file, map_location="cpu", weights_only=False)
            if state:
                self._found[slot.param] = state

    def _send(self, tensor: Tensor) -> None:
        interruptible_wait(dist.isend(tensor, group=self._group.control_group, group_dst=0))

    def _receive(self, tensor: Tensor, source: int) -> Tensor:
        group = self._group.control_group
        interruptible_wait(dist.irecv(tensor, group=group, group_src=source))
        return tensor


def _range_of(share: Share, state: Tensor) -> Tensor:
    """This rank's range of ``state``, which has its shape, or the parameter's if that is all of it."""
    if state.shape == share.slot.param.shape:
        state = share.of(in_memory_of(share.slot.param, state))
    return state.detach().cpu()
