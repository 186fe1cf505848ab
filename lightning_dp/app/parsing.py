"""What several parsers of the command line use."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_MOST_NAMES = 12


def positive(text: str) -> int:
    """Read a whole number of 1 or more.

    Raises:
        ArgumentTypeError: It is none; the parser adds the option's name.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    if len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be below 1e18, not {text!r}")
    return int(text)


def add_options(parser: Any, *rows: tuple[Any, ...]) -> None:
    """Add options to a parser, or to a group of one; their help says the default.

    Args:
        parser: Takes them.
        rows: For each its names (``"-n --ranks"``), what reads its value (or a tuple of all values, or
            ``bool`` for a flag), its default, its meaning, and the default in words where the value does
            not say it.
    """
    for names, kind, default, meaning, *shown in rows:
        how = {"type": kind}
        if isinstance(kind, tuple):
            how = {"type": type(default), "choices": kind}
        elif kind is bool:
            how = {"action": "store_true"}
        text = f"{meaning} (default: {shown[0] if shown else '%(default)s'})"
        parser.add_argument(*names.split(), default=default, help=text, **how)


def nearest(name: str, known: Iterable[str], before: str = "") -> list[str]:
    """The name in ``known`` that ``name`` may have been meant for, with ``before`` in front, or none."""
    return [before + near for near in difflib.get_close_matches(name, list(known), n=1)]


def advice(near: Sequence[str], known: Sequence[str] = ()) -> str:
    """Ask for the names in ``near``; where there are none, say which are ``known``."""
    if near:
        return f" Did you mean {' or '.join(near)}?"
    if len(known) > _MOST_NAMES:
        return " --cfg job prints what there is."
    return f" There is: {', '.join(known)}." if known else ""
