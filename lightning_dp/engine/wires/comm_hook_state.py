"""What a communication hook remembers, in a checkpoint: plain data, by rank where ranks differ.

PowerSGD keeps, for each bucket, two factors that are equal on all ranks and an error that is each
rank's own; its random numbers choose projections that all ranks must share. Hooks are asked only for
their attributes, or for ``state_dict`` and ``load_state_dict`` where they have them, so a user's own
state is saved as well: numbers, text, tensors, and dictionaries and lists of those.

[Note: states belong to buckets] Hooks know a bucket by its index alone. So the layout is saved with
them, and a resumed run cuts the same buckets before the first hook is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import Layout

FORMAT = 1
PER_RANK = ("error_dict",)  # what differs between ranks
BY_BUCKET = (*PER_RANK, "p_memory_dict", "q_memory_dict")  # keyed by a bucket's number
# Given to the constructors of torch's states: a resumed run may choose others, and then keeps them.
SETTINGS = {
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "orthogonalization_epsilon",
    "use_error_feedback",
    "warm_start",
    "batch_tensors_with_same_shape",
    "compression_stats_logging_frequency",
}
_PLAIN = (bool, int, float, str, type(None))


def hook_state(state: object, layout: Layout, group: ReplicaGroup) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of ``state``; ``None`` where there is nothing to keep.

    Args:
        state: The hook's.
        layout: The buckets that it knows by number.
        group: Who takes part.

    Returns:
        The same on every rank, but for tensors that were gathered, which only rank 0 holds. Loads with
        ``torch.load(weights_only=True)``.

    Collective: every rank. Blocks. Sends as many bytes as this rank's own part has.
    """
    attributes = _attributes(state)
    own = {name: attributes.pop(name) for name in PER_RANK if name in attributes}
    plain = {name: it for name, value in attributes.items() if (it := _plain(value)) is not ...}
    if not plain and not own:
        return None
    gathered = {
        name: {
            index: group.gather_object(error.detach().cpu().clone(), "what a hook keeps")
            for index, error in sorted(table.items())
        }
        for name, table in own.items()
        if isinstance(table, dict)
    }
    return {
        "format": FORMAT,
        "world_size": group.world_size,
        "layout": layout.describe(),
        "settings": {name: value for name, value in plain.items() if name in SETTINGS},
        "common": {name: value for name, value in plain.items() if name not in SETTINGS},
        "per_rank": gathered,
    }


def load_hook_state(state: object, saved: Mapping[str, Any], group: ReplicaGroup) -> str:
    """Put back what ``hook_state`` saved.

    What is common to all ranks is always put back. What each rank had of its own needs the same number
    of ranks; otherwise it begins empty, which for error feedback costs one step's error once.

    Returns:
        What could not be put back, and why; empty if everything was.

    Local; every rank calls it.
    """
    common: dict[str, Any] = {
        name: _restored(value, group.device) for name, value in saved["common"].items()
    }
    own: dict[str, dict[int, Tensor]] = {}
    message = ""
    for name, table in saved["per_rank"].items():
        own[name] = {}
        if saved["world_size"] == group.world_size:
            own[name] = {
                number: parts[group.rank].to(group.device) for number, parts in table.items()
            }
        elif table:
            message = (
                f"the checkpoint holds {name} of {saved['world_size']} rank(s) and this run has"
                f" {group.world_size}: it begins empty"
            )
    changed = [n for n, value in saved["settings"].items() if getattr(state, n, ...) != value]
    if changed:
        message = f"{', '.join(changed)} changed: what it kept of each bucket begins empty"
        own = {name: {} for name in own}
        common = {name: {} if name in BY_BUCKET else value for name, value in common.items()}
    if hasattr(state, "load_state_dict"):
        state.load_state_dict({**common, **own})
        return message
    for name, value in {**common, **own}.items():
        if name == "rng":
            getattr(state, name).set_state(_numpy_state(value))
        elif hasattr(state, name):
            setattr(state, name, value)
    return message


def by_bucket(state: object) -> list[dict[int, Any]]:
    """What PowerSGD keeps by a bucket's number."""
    found = (getattr(state, name, None) for name in BY_BUCKET)
    return [table for table in found if isinstance(table, dict)]


def forget(state: object) -> None:
    """Drop what PowerSGD keeps of buckets that no longer exist; it begins anew."""
    for table in by_bucket(state):
        table.clear()


def _attributes(state: object) -> dict[str, Any]:
    if state is None or isinstance(state, dist.ProcessGroup):
        return {}
    if hasattr(state, "state_dict"):
        return dict(state.state_dict())
    names = [*getattr(type(state), "__slots__", ()), *getattr(state, "__dict__", ())]
    return {name: value for name in names if (value := getattr(state, name, ...)) is not ...}


def _plain(value: Any) -> Any:
    """Return ``value`` as plain data, tensors on the CPU; ``...`` where that is not possible."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if hasattr(value, "get_state") and hasattr(value, "set_state"):
        return _from_numpy_state(value.get_state())
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return ... if any(item is ... for item in items) else items
    if isinstance(value, dict):
        pairs = {key: _plain(item) for key, item in value.items()}
        plain_keys = all(isinstance(key, (int, str)) for key in pairs)
        return pairs if plain_keys and all(item is not ... for item in pairs.values()) else ...
    return ...


def _from_numpy_state(state: Any) -> Any:
    kind, keys, position, has_gauss, cached = state  # numpy.random.RandomState's legacy tuple
    numbers = torch.tensor([int(key) for key in keys], dtype=torch.int64, device="cpu")
    return [str(kind), numbers, int(position), int(has_gauss), float(cached)]


def _numpy_state(saved: list[Any]) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = saved
    return kind, keys.numpy().astype("uint32"), position, has_gauss, cached


def _restored(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device).clone()
    if isinstance(value, dict):
        return {key: _restored(item, device) for key, item in value.items()}
    return value
