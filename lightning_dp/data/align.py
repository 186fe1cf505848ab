"""Loaders whose end nobody knows: stop at the same step on all ranks, and know what was trained.

Nothing here communicates by itself: what ranks agree on comes through :class:`Alignment`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_dp.data.batch_hash import NOTHING
from lightning_dp.data.loader import copy_loader


class Alignment(Protocol):
    """How ranks agree about loaders whose ends nobody knows beforehand."""

    def first(self, batch: Any) -> None:
        """Look at this rank's first batch (or ``NOTHING``); may say, or raise, that ranks see the same.

        Collective: every rank, when its first batch is there.
        """

    def post(self, has_next: bool) -> Callable[[], bool]:
        """Tell the others whether this rank has one more batch; the result answers whether all have.

        Collective: every rank, before each batch. Does not block; the returned function does.
        """


def is_stateful(loader: Any) -> bool:
    """Whether the user's loader can say where it is, and go on from there."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(type(loader), name, None)) for name in names)


class _Walk:
    """One batch of look-ahead over a loader, with the state that belongs to each batch.

    Args:
        loader: The user's, for its state.
        trained: Returns how many batches were trained so far, in any epoch.
        alignment: How ranks agree on the end; ``None`` for one rank.
        keep: How many batches back the state must be known.
    """

    # Our look-ahead and Lightning's, the batch in training, and one that was just finished.
    _AHEAD = 4

    def __init__(
        self, loader: Any, trained: Callable[[], int], alignment: Alignment | None, keep: int
    ) -> None:
        self._loader = loader
        self._trained = trained
        self._alignment = alignment
        self._stateful = is_stateful(loader)
        self._states: deque[tuple[int, Any]] = deque(maxlen=self._AHEAD + keep)
        self._base = 0

    def over(self, iterator: Iterator[Any], state: Callable[[], Any]) -> Iterator[Any]:
        """Yield the batches of ``iterator`` as long as all ranks have one."""
        self._base = self._trained()
        self._states.clear()
        if not self._stateful and self._alignment is None:
            return iterator
        return self._steps(iterator, state)

    def _steps(self, iterator: Iterator[Any], state: Callable[[], Any]) -> Iterator[Any]:
        pulled = 0

        def pull() -> Any:
            nonlocal pulled
            if self._stateful:
                self._states.append((pulled, state()))
            pulled += 1
            return next(iterator, NOTHING)

        held = pull()
        if self._alignment is None:
            while held is not NOTHING:
                yield held
                held = pull()
            return
        self._alignment.first(held)
        all_have_one = self._alignment.post(held is not NOTHING)
        while all_have_one():
            current, held = held, pull()
            all_have_one = self._alignment.post(held is not NOTHING)
            yield current

    def state(self, current: Callable[[], Any]) -> Any:
        """Return the loader's state after the batches that were trained, not those that were read."""
        since = self._trained() - self._base
        for pulled, state in self._states:
            if pulled == since:
                return state
        return current()


class _Aligned:
    """Mixed into the class of a copied DataLoader."""

    _walk: _Walk
    _length: int | None

    def __iter__(self) -> Any:
        loader: Any = super()
        return self._walk.over(loader.__iter__(), lambda: loader.state_dict())

    def __len__(self) -> int:
        loader: Any = super()
        return loader.__len__() if self._length is None else self._length


class _AlignedStateful(_Aligned):
    def state_dict(self) -> Any:
        loader: Any = super()
        return self._walk.state(loader.state_dict)


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
        return self._walk.over(iter(self._loader), lambda: self._loader.state_dict())

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length


class _StatefulStand(_Stand):
    def state_dict(self) -> Any:
        return self._walk.state(self._loader.state_dict)

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)


def align(
    loader: Any,
    trained: Callable[[], int],
    alignment: Alignment | None,
    length: int | None = None,
    keep: int = 1,
) -> Any:
    """Return ``loader`` (copied, or with something in its place) with all ranks ending at the same step.

    Args:
        loader: Any iterable of batches.
        trained: Returns how many batches were trained so far.
        alignment: How ranks agree on the end; ``None`` for one rank.
        length: What ``len()`` should say instead of the loader itself.
        keep: How many batches back a stateful loader's state must be known.
    """
    walk = _Walk(loader, trained, alignment, keep)
    if isinstance(loader, DataLoader):
        kind = type(loader)
        mixin = _AlignedStateful if is_stateful(loader) else _Aligned
        mixed = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
        return copy_loader(loader, mixed, _walk=walk, _length=length)
    return (_StatefulStand if is_stateful(loader) else _Stand)(loader, walk, length)
