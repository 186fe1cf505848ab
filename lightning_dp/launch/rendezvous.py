"""The ranks find each other: a store of our own, a roll call with names, a short timeout.

[Note: why not env://] torch's own start-up waits as long as a collective may take (30 minutes) and does not
say who is missing. Under ``torchrun --max-restarts`` it also reads the addresses that the previous attempt
left in the agent's store (pytorch issues 135712 and 167288).

[Note: roll call] Keys in a store may be left over from processes that are gone, so each rank brings a
number drawn for this occasion. Rank 0 answers each by repeating it; a rank that reads its own number in
the answer knows that the answer is fresh, and says so under the name of the new rendezvous. Only then does
it begin, under a prefix that nobody has used before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import LaunchError
from lightning_dp.faults.liveness import ProcessIdentity
from lightning_dp.faults.store import Store, with_prefix

_HELLO, _SEAT, _FAIL = "hello", "seat", "fail"
_LONGEST_PAUSE_S = 0.1


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """All ranks, met.

    Attributes:
        store: Reached by all ranks; its prefix is new.
        members: What each rank brought, by rank.
        processes: The process of each rank, by rank.
    """

    store: Store
    members: tuple[dict[str, Any], ...]
    processes: tuple[ProcessIdentity, ...]


def rendezvous(
    store: Store,
    rank: int,
    world_size: int,
    info: dict[str, Any],
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Rendezvous:
    """Wait until all ranks are here; return who they are.

    Args:
        store: Reached by all ranks; may hold keys of earlier meetings.
        rank: This rank.
        world_size: How many ranks are expected.
        info: What to tell the others; must be JSON.
        timeout_s: Seconds to wait for the others.
        check: Called while waiting, to raise when a rank is known to have died.

    Raises:
        LaunchError: Some ranks did not come; the message names them.

    Collective: every rank, once per rendezvous. Blocks.
    """
    identity = ProcessIdentity.of_this_process()
    nonce = secrets.token_hex(8)
    mine = {"nonce": nonce, "process": dataclasses.asdict(identity), "info": info}
    store.set(f"{_HELLO}/{rank}", json.dumps(mine))
    if rank == 0:
        name, roll = _hold_roll_call(store, world_size, timeout_s, check)
    else:
        name, roll = _answer_roll_call(store, rank, world_size, nonce, timeout_s, check)
    return Rendezvous(
        store=with_prefix(f"rendezvous/{name}", store),
        members=tuple(entry["info"] for entry in roll),
        processes=tuple(ProcessIdentity(**entry["process"]) for entry in roll),
    )


def _hold_roll_call(
    store: Store, world_size: int, timeout_s: float, check: Callable[[], None]
) -> tuple[str, list[dict[str, Any]]]:
    """Rank 0: answer everyone until everyone has confirmed the answer."""
    name = secrets.token_hex(8)
    roll: dict[int, dict[str, Any]] = {0: json.loads(store.get(f"{_HELLO}/0"))}
    present = {0}

    def all_present() -> bool:
        for rank in set(range(world_size)) - present:
            if not store.check([f"{_HELLO}/{rank}"]):
                continue
            entry = json.loads(store.get(f"{_HELLO}/{rank}"))
            if roll.get(rank, {}).get("nonce") != entry["nonce"]:
                roll[rank] = entry
                store.set(f"{_SEAT}/{rank}", f"{name} {entry['nonce']}")
            if store.check([f"{name}/here/{rank}"]):
                present.add(rank)
        if len(present) < world_size:
            check()
        return len(present) == world_size

    if not poll_until(all_present, timeout_s, longest_pause_s=_LONGEST_PAUSE_S):
        message = _missing(world_size, present, roll, timeout_s)
        store.set(f"{name}/{_FAIL}", message)
        raise LaunchError(message)
    ordered = [roll[rank] for rank in range(world_size)]
    store.set(f"{name}/go", json.dumps(ordered))
    return name, ordered


def _answer_roll_call(
    store: Store,
    rank: int,
    world_size: int,
    nonce: str,
    timeout_s: float,
    check: Callable[[], None],
) -> tuple[str, list[dict[str, Any]]]:
    """Other ranks: wait for an answer to one's own number, confirm it, wait for the start."""

    def seat() -> str:
        check()
        if not store.check([f"{_SEAT}/{rank}"]):
            return ""
        name, answered = store.get(f"{_SEAT}/{rank}").decode().split()
        return name if answered == nonce else ""

    def verdict() -> str:
        check()
        return next((key for key in ("go", _FAIL) if store.check([f"{name}/{key}"])), "")

    # The seat is for good: rank 0 may be at the next rendezvous before this rank reads "go".
    found = ""
    if name := poll_until(seat, timeout_s, longest_pause_s=_LONGEST_PAUSE_S):
        store.set(f"{name}/here/{rank}", "1")
        # Rank 0's list of who is missing is better than none.
        found = poll_until(verdict, timeout_s + 5.0, longest_pause_s=_LONGEST_PAUSE_S)
    if not found:
        raise LaunchError(
            f"[lean_ddp rank {rank}/{world_size}] rank 0 did not answer within {timeout_s:.0f} s: "
            "rank 0 is missing. Fix: start all ranks, or raise rendezvous_timeout_s."
        )
    text = store.get(f"{name}/{found}").decode()
    if found == _FAIL:
        raise LaunchError(text.replace("rank 0/", f"rank {rank}/", 1))
    return name, json.loads(text)


def _missing(
    world_size: int, present: set[int], roll: dict[int, dict[str, Any]], timeout_s: float
) -> str:
    came = ", ".join(f"{r} ({roll[r]['info'].get('host', '?')})" for r in sorted(present))
    missing = ", ".join(map(str, sorted(set(range(world_size)) - present)))
    return (
        f"[lean_ddp rank 0/{world_size}] {world_size} ranks were expected within "
        f"{timeout_s:.0f} s. Joined: {came}. Missing: {missing}. Fix: start the "
        "missing ranks (look at their output first), set devices x num_nodes to the number that you "
        "start, or raise rendezvous_timeout_s."
    )


def describe_this_rank() -> dict[str, Any]:
    """What every rank brings to a rendezvous: enough to recognise it in a message."""
    return {"host": socket.gethostname(), "pid": os.getpid()}
