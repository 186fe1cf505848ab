"""What several parsers of the command line use."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence

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
