"""Exchange an attribute for as long as it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NOTHING = object()


def patched(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set ``owner.name``; return what restores it as it was.

    What the owner had of its own is put back; otherwise the attribute is taken away again, so that its
    class's shows. A second call of what is returned does nothing.

    Args:
        owner: An instance, or a class.
        name: Of the attribute.
        value: Its value meanwhile.
    """
    before = [vars(owner).get(name, _NOTHING)]
    setattr(owner, name, value)

    def undo() -> None:
        while before:
            own = before.pop()
            if own is not _NOTHING:
                setattr(owner, name, own)
            elif name in vars(owner):
                delattr(owner, name)

    return undo


def all_of(*undos: Callable[[], None]) -> Callable[[], None]:
    """Return what calls all of ``undos``, the last one first."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo
