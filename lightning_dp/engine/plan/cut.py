"""Which gradients travel together: planning with integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotSpec:
    """What planning needs to know of a slot.

    Attributes:
        index: Whose it is.
        nbytes: Bytes on the wire.
        key: Only slots with equal keys share a bucket.
    """

    index: int
    nbytes: int
    key: tuple[object, ...]


def plan_buckets(
    specs: Sequence[SlotSpec], cap_bytes: int, first_bytes: int, last_bytes: int
) -> list[list[int]]:
    """Cut slots, given in order of arrival, into buckets.

    Slots with one key fill a bucket until it has about ``cap_bytes``: one that is at least half full
    closes before a slot that would take it beyond one and a half, so that neither a weight just above
    the cap leaves its bias to travel alone, nor two large weights wait for each other. The very first
    bucket is small so that the wire starts early, the very last so that little is left to wait for when
    the backward ends.

    Args:
        specs: In the order in which gradients arrive.
        cap_bytes: About how many bytes make a bucket.
        first_bytes: The same for the first bucket.
        last_bytes: Most bytes of the bucket that holds the last arrival, unless that alone has more.

    Returns:
        Lists of ``index``, in launch order: by each bucket's last arrival.
    """
    tail = _tail(specs, last_bytes)
    open_buckets: dict[tuple[object, ...], tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for spec in specs:
        key = (*spec.key, spec.index in tail)
        cap = cap_bytes if closed else min(first_bytes, cap_bytes)
        members, size = open_buckets.pop(key, ([], 0))
        if 2 * size >= cap and 2 * (size + spec.nbytes) > 3 * cap:
            closed.append(members)
            members, size = [], 0
        members.append(spec.index)
        size += spec.nbytes
        if size >= cap:
            closed.append(members)
        else:
            open_buckets[key] = members, size
    closed.extend(members for members, _ in open_buckets.values())
    arrival = {spec.index: position for position, spec in enumerate(specs)}
    return sorted(closed, key=lambda indices: max(arrival[index] for index in indices))


def _tail(specs: Sequence[SlotSpec], last_bytes: int) -> set[int]:
    """Return the last arrivals of one key that together have at most ``last_bytes``; at least one."""
    tail: set[int] = set()
    size = 0
    for spec in reversed(specs):
        if spec.key != specs[-1].key:
            continue
        if tail and size + spec.nbytes > last_bytes:
            break
        tail.add(spec.index)
        size += spec.nbytes
    return tail
