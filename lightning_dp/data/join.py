"""Loaders whose end nobody knows: stop at the same step on all ranks, and know what was trained.

Nothing here communicates by itself: what ranks agree on comes through :class:`Join`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_dp.data.content_hash import NOTHING
from lightning_dp.data.loader import copy_loader, is_stateful


class Join(Protocol):
    """How ranks with uneven inputs agree to end together."""

    def first(self, batch: Any) -> None:
        """Look at this rank's first batch (or ``NOTHING``); may say, or raise, that ranks see the same.

        Collective: every rank, when its first batch is there.
        """

    def post(self, has_next: bool) -> Callable[[], bool]:
        """Tell the others whether this rank has one more batch; the result answers whether all have.

        Collective: every rank, before each batch. Does not block; the returned function does.
        """


class _Walk:
    """One pass after another over a loader, with the state that belongs to each batch.

    Args:
        loader: The user's, or a copy of it.
        trained: Returns how many batches were trained so far, in any epoch.
        join: How ranks agree on the end; ``None`` for one rank, or an end that is known.
        keep: How many batches back the state must be known.
        state: What the loader is given before its first pass.

    [Note: when a state is asked for] Some loaders take being asked for their state, or anything else, as
    the beginning of a pass, and some return the dictionary that they go on writing to. So a state is
    given to the loader in the moment in which its pass begins; it is asked for only after a batch of the
    pass, and copied. Until then its state is the one that it was given: none at the head of a pass.
    """

    # Our look-ahead and Lightning's, the batch in training, and one that was just finished.
    _AHEAD = 4

    def __init__(
        self, loader: Any, trained: Callable[[], int], join: Join | None, keep: int, state: Any
    ) -> None:
        self._trained = trained
        self._join = join
        self._stateful = is_stateful(loader)
        self._states: deque[tuple[int, Any]] = deque(maxlen=self._AHEAD + keep)
        self._base = self._pulled = 0
        self.given = state

    def over(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of ``loader`` (its own class's methods) as long as all ranks have one."""
        self._base, self._pulled = self._trained(), 0
        self._states.clear()
        given, self.given = self.given, None
        if given is not None:
            loader.load_state_dict(deepcopy(given))
        self._states.append((0, given))
        iterator = loader.__iter__() if hasattr(loader, "__iter__") else iter(loader)
        return self._steps(iterator, loader) if self._stateful or self._join else iterator

    def _steps(self, iterator: Iterator[Any], loader: Any) -> Iterator[Any]:
        def pull() -> Any:
            if self._stateful and self._pulled:
                self._states.append((self._pulled, deepcopy(loader.state_dict())))
            self._pulled += 1
            return next(iterator, NOTHING)

        held = pull()
        if self._join is None:
            while held is not NOTHING:
                yield held
                held = pull()
            return
        self._join.first(held)
        all_have_one = self._join.post(held is not NOTHING)
        while all_have_one():
            current, held = held, pull()
            all_have_one = self._join.post(held is not NOTHING)
            yield current

    def state(self, loader: Any, back: int) -> Any:
        """Return the state after the batches that were trained, ``back`` of them left out.

        Not after those that were read ahead. ``None`` at the head of a pass, or if it is not known.
        """
        if not self._states:
            return self.given
        since = self._trained() - back - self._base
        for pulled, state in self._states:
            if pulled == since:
                return state
        return deepcopy(loader.state_dict()) if since == self._pulled else None


class _Joined:
    """Mixed into the class of a copied DataLoader."""

    _walk: _Walk
    _length: int | None

    def __iter__(self) -> Any:
        return self._walk.over(super())

    def __len__(self) -> int:
        loader: Any = super()
        return loader.__len__() if self._length is None else self._length


class _JoinedStateful(_Joined):
    def state_dict(self, back: int = 0) -> Any:
        return self._walk.state(super(), back)

    def load_state_dict(self, state: Any) -> None:
        self._walk.given = state


class _Stand:
    """Stands for a loader that is no DataLoader."""

    def __init__(self, loader: Any, walk: _Walk, length: int | None) -> None:
        self._loader = loader
        self._walk = walk
        self._length = length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Any:
        return self._walk.over(self._loader)

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length


class _StatefulStand(_Stand):
    def state_dict(self, back: int = 0) -> Any:
        return self._walk.state(self._loader, back)

    def load_state_dict(self, state: Any) -> None:
        self._walk.given = state


def join_ends(
    loader: Any,
    trained: Callable[[], int],
    join: Join | None,
    length: int | None = None,
    keep: int = 1,
    state: Any = None,
) -> Any:
    """Return ``loader`` (copied, or with something in its place) with all ranks ending at the same step.

    Its ``state_dict(back=0)``, where the loader has one, is that of what was trained; ``None`` before the
    first batch, unless a state was loaded.

    Args:
        loader: Any iterable of batches.
        trained: Returns how many batches were trained so far.
        join: How ranks agree on the end; ``None`` for one rank, or an end that is known.
        length: What ``len()`` should say instead of the loader itself.
        keep: How many batches back a stateful loader's state must be known.
        state: Given to a stateful loader when its first pass begins.
    """
    walk = _Walk(loader, trained, join, keep, state)
    if isinstance(loader, DataLoader):
        kind = type(loader)
        mixin = _JoinedStateful if is_stateful(loader) else _Joined
        mixed = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
        return copy_loader(loader, mixed, _walk=walk, _length=length)
    return (_StatefulStand if is_stateful(loader) else _Stand)(loader, walk, length)
