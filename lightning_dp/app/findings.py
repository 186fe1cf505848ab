"""What a check found, and how it is shown: a table on a terminal, plain lines in a pipe, or JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from lightning_dp.app.tables import print_table

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


def show(
    findings: Sequence[Finding], *, title: str, as_json: bool = False, strict: bool = False
) -> None:
    """Print ``findings`` to stdout, and unless ``as_json`` a last line that sums them up."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return
    if sys.stdout.isatty():
        fixes = [f"\n-> fix: {finding.fix}" if finding.fix else "" for finding in findings]
        rows = [(f.level, f"{f.what}{fix}") for f, fix in zip(findings, fixes, strict=True)]
        print_table(title, rows, [_STYLES[finding.level] for finding in findings])
    else:
        for finding in findings:
            fix = f"  -> fix: {finding.fix}" if finding.fix else ""
            print(f"{finding.level:<5} {finding.what}{fix}")
    print(summary(findings, strict=strict))


def summary(findings: Sequence[Finding], *, strict: bool = False) -> str:
    """Count the levels, and say what the exit code means."""
    number = Counter(str(finding.level) for finding in findings)
    counts = ", ".join(f"{number[level]} {level}" for level in _STYLES)
    code = exit_code(findings, strict=strict)
    wrong = "failed or was warned about" if strict else "failed"
    meaning = f"nothing {wrong}" if code == 0 else f"something {wrong}"
    return f"{counts}; exit code {code}: {meaning}"


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """1 if anything failed, or with ``strict`` was warned about; else 0."""
    levels = {finding.level for finding in findings}
    return int("FAIL" in levels or (strict and "warn" in levels))
