"""The optimizer's state in shares: cut where it is whole, and whole again for a checkpoint.

A state tensor with the shape of its parameter has an element for each of the parameter's; everything else
(counters) is kept as it is, and equal on all ranks that keep it.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.waiting import interruptible_wait
from lightning_dp.optim.exchange import in_memory_of
from lightning_dp.optim.shares import Share, Shares

State = dict[str, Any]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Parameters in the order of ``optimizer``'s groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_elementwise(value: Any, share: Share) -> bool:
    return isinstance(value, Tensor) and value.shape == share.slot.param.shape


def cut(optimizer: Optimizer, shares: Shares) -> None:
    """Keep of a whole state (fresh, or loaded) what belongs to this rank's shares. Local, idempotent."""
    for parameter in parameters_of(optimizer):
        share = shares.of(parameter)
        if share is None or share.is_whole or parameter not in optimizer.state:
            continue
        if share.is_empty:
            del optimizer.state[parameter]
            continue
        state = optimizer.state[parameter]
        for key, value in state.items():
            if _is_elementwise(value, share):
                state[key] = share.of(in_memory_of(parameter, value)).clone()


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
            if self._shares.of(parameter) is None and parameter in self._optimizer.state:
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
                mine[place : place + length] = _flat(share, state)
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


def _flat(share: Share, state: Tensor) -> Tensor:
    """This rank's range of ``state``, which has its shape, or the parameter's if that is all of it."""
    if state.shape == share.slot.param.shape:
        state = share.of(in_memory_of(share.slot.param, state))
    return state.detach().cpu()
