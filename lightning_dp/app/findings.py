"""What a check found, and how it is shown: a table on a terminal, plain lines in a pipe, or JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

Level = Literal["ok", "warn", "FAIL"]
_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        level: "ok", "warn" or "FAIL".
        what: What was looked at, and what was seen.
        fix: What to do about it, as a line to type where there is one.
    """

    level: Level
    what: str
    fix: str = ""


def show(findings: Sequence[Finding], *, title: str, as_json: bool = False) -> None:
    """Print ``findings`` to stdout."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return
    if not sys.stdout.isatty():
        for finding in findings:
            fix = f"  -> fix: {finding.fix}" if finding.fix else ""
            print(f"{finding.level:<5} {finding.what}{fix}")
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for finding in findings:
        style = _STYLES[finding.level]
        fix = f"\n-> fix: {finding.fix}" if finding.fix else ""
        table.add_row(f"[{style}]{finding.level}[/{style}]", f"{finding.what}{fix}")
    Console().print(table)


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """1 if anything failed, or with ``strict`` was warned about; else 0."""
    levels = {finding.level for finding in findings}
    return int("FAIL" in levels or (strict and "warn" in levels))
