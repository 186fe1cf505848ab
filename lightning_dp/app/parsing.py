"""What several parsers of the command line use."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a whole number of 1 or more.

    Raises:
        ArgumentTypeError: It is none; the parser adds the option's name.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return number
