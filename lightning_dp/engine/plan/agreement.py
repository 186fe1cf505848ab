"""What ranks agree on when parameters get their buckets: order of arrival, who fires twice, who is sparse.

It happens in the first reducing backward, and again when a parameter becomes trainable or is added.
Buckets planned earlier never change: layouts only grow, so states that hooks keep by bucket index stay
valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.errors import RankFailedError, ReplicaMismatchError, some_names


@dataclass
class Profile:
    """What one rank saw of the parameters that have no bucket yet.

    Attributes:
        trainable: Their numbers, sorted.
        fired: The numbers that got a gradient, in order of (last) arrival.
        repeated: Numbers that fired more than once.
        nested: Numbers that fired inside a re-entrant backward.
        sparse: Numbers whose gradient is sparse.
        error: What went wrong on this rank, or ``None``.
    """

    trainable: list[int]
    fired: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    nested: list[int] = field(default_factory=list)
    sparse: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Agreement:
    """What all ranks make of their profiles.

    Attributes:
        order: Numbers of all parameters concerned, in the order to plan buckets in.
        deferred: Those that go last: they fire more than once somewhere, or nowhere yet.
        nested: Those that fire in a re-entrant backward but only once.
        sparse: Those whose gradient is sparse on some rank.
        unseen: Those that got no gradient on any rank.
    """

    order: list[int]
    deferred: frozenset[int]
    nested: frozenset[int]
    sparse: frozenset[int]
    unseen: frozenset[int]


def agree(profile: Profile, group: ReplicaGroup, names: Sequence[str]) -> Agreement:
    """Exchange profiles and return the same agreement on every rank.

    Args:
        profile: This rank's.
        group: Who takes part.
        names: Parameter names by number, for messages.

    Raises:
        RankFailedError: Another rank's backward raised.
        ReplicaMismatchError: Ranks differ in which parameters are trainable.

    Collective: every rank, when any rank has a trainable parameter without a bucket. Blocks.
    """
    profiles: list[Profile] = group.all_gather_object(profile)
    for rank, other in enumerate(profiles):
        if other.error is not None and profile.error is None:
            raise RankFailedError(
                f"[rank {group.rank}] rank {rank} failed in its backward: {other.error}. This rank stops"
                " with it: a step without one rank's gradients would be another step.",
                rank=rank,
                remote_traceback=other.error,
            )
    for rank, other in enumerate(profiles):
        if other.trainable != profiles[0].trainable:
            difference = sorted(set(other.trainable) ^ set(profiles[0].trainable))
            named = [names[number] for number in difference]
            raise ReplicaMismatchError(
                f"[rank {group.rank}] requires_grad differs between rank 0 and rank {rank} for"
                f" {some_names(named)}. Freeze and unfreeze the same parameters at the same step on"
                " every rank.",
                names=named,
                ranks=(rank,),
            )
    # The rank that saw most knows the order best; the lowest such rank, so that all pick the same.
    leader = max(profiles, key=lambda each: len(each.fired))
    seen = set().union(*(each.fired for each in profiles))
    order = list(leader.fired)
    order += sorted(seen - set(order), reverse=True)
    # Never fired anywhere: last, so that they delay no other bucket.
    unseen = [n for n in reversed(profile.trainable) if n not in seen]
    repeated = set().union(*(each.repeated for each in profiles))
    nested = set().union(*(each.nested for each in profiles)) - repeated
    return Agreement(
        order=order + unseen,
        deferred=frozenset(repeated | set(unseen)),
        nested=frozenset(nested),
        sparse=frozenset().union(*(each.sparse for each in profiles)),
        unseen=frozenset(unseen),
    )
