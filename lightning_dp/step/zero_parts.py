"""A checkpoint whose optimizers' states are in parts: what its file has, and what lies beside it.

``torch.distributed.checkpoint`` takes a while to import: it is when it is used.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.errors import ConfigError
from lightning_dp.faults.checkpoint_io import PARTS, parts_folder, sync_folder
from lightning_dp.optim.exchange import MASTER
from lightning_dp.optim.sharded import ShardedOptimizer
from lightning_dp.optim.state import materialised, without_masters

_LABEL = "optimizer_states.{}.state"


def write_parts(
    checkpoint: dict[str, Any],
    path: Any,
    optimizers: Mapping[int, ShardedOptimizer],
    group: ReplicaGroup,
) -> None:
    """Let every rank write its part of the states for the checkpoint ``path``, and note where.

    Args:
        checkpoint: Gets ``lean_ddp.parts`` in place of ``optimizer_states``.
        path: Of the file that is about to be written. Until then the one that is there holds.
        optimizers: Those whose states are in shares, by number.
        group: Who takes part.

    Raises:
        ConfigError: ``path`` is not a local one.

    Collective: every rank. Blocks.
    """
    if "://" in str(path):
        raise ConfigError(
            f"zero={{'format': 'sharded'}} cannot write to {path}: ranks write to a folder of their hosts."
            " Save to a local path, or use 'plain'."
        )
    from lightning_dp.optim.folder import write

    name = group.broadcast_object(secrets.token_hex(4))
    folder = parts_folder(path) / name
    mine = (each.entries(_LABEL.format(number)) for number, each in optimizers.items())
    checksums = write(folder, chain.from_iterable(mine), group)
    sync_folder(folder)
    sync_folder(folder.parent)
    checkpoint.setdefault("lean_ddp", {})[PARTS] = {
        "folder": f"{folder.parent.name}/{name}",
        "checksums": checksums,
        "optimizer_states": checkpoint.pop("optimizer_states"),
    }


def read_parts(
    checkpoint: dict[str, Any], path: Any, rank: int, world_size: int, weights_only: bool | None
) -> None:
    """Give a loaded checkpoint its ``optimizer_states``, whose large tensors stay on disk.

    Raises:
        CheckpointError: Names the file that is missing or damaged.

    Local; every rank calls it, and checks some of the files.
    """
    parts = checkpoint.get("lean_ddp", {}).pop(PARTS, None)
    if parts is None:
        return
    from lightning_dp.optim.folder import Folder, read, verify

    folder = Path(os.path.realpath(path)).parent / parts["folder"]
    verify(folder, parts["checksums"], rank, world_size)
    states = [{**each, "state": dict(each["state"])} for each in parts["optimizer_states"]]
    for label, state in read(Folder(folder, weights_only)).items():
        _, number, _, parameter = label.split(".")
        states[int(number)]["state"][int(parameter)] = state
    checkpoint["optimizer_states"] = states


def without_parts(
    states: list[dict[str, Any]], optimizers: Mapping[int, ShardedOptimizer]
) -> list[dict[str, Any]]:
    """What to load at once: whole states, but nothing for the parameters of ``optimizers``. Local."""
    return [
        {**each, "state": {}} if number in optimizers else _whole(each)
        for number, each in enumerate(states)
    ]


def _whole(each: dict[str, Any]) -> dict[str, Any]:
    """A state dict with what is still on disk read."""
    state = each.get("state")
    if not isinstance(state, dict):
        return each  # an optimizer's own form
    return {
        **each,
        "state": {k: materialised(v) if isinstance(v, dict) else v for k, v in state.items()},
    }


# Masters, which other strategies do not know


def set_masters_apart(checkpoint: dict[str, Any]) -> None:
    """Move masters from ``optimizer_states`` to ``lean_ddp.masters``: the rest is as without. Local."""
    states = checkpoint["optimizer_states"]
    masters = [
        {n: state[MASTER] for n, state in each.get("state", {}).items() if MASTER in state}
        for each in states
    ]
    if not any(masters):
        return
    checkpoint.setdefault("lean_ddp", {})["masters"] = masters
    checkpoint["optimizer_states"] = [
        {**each, "state": {n: v for n, v in without_masters(each["state"]).items() if v}}
        for each in states
    ]


def put_masters_back(checkpoint: dict[str, Any]) -> None:
    """Undo :func:`set_masters_apart`. Local."""
    masters = checkpoint.get("lean_ddp", {}).pop("masters", ())
    for each, theirs in zip(checkpoint.get("optimizer_states", ()), masters, strict=False):
        for number, master in theirs.items():
            each["state"].setdefault(number, {})[MASTER] = master


def has_masters(states: list[dict[str, Any]]) -> bool:
    """Whether there is a master in some parameter's state. Local."""
    every = [each.get("state") for each in states]
    found = [value for state in every if isinstance(state, dict) for value in state.values()]
    return any(isinstance(value, dict) and MASTER in value for value in found)
