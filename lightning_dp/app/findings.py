"""What a check found, and how it is shown: a line each (coloured on a terminal), or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from lightning_dp.app.parsing import add_options

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


def judged(good: bool, what: str, fix: str, bad: Level = "FAIL") -> Finding:
    """Return an ok without a fix if ``good``, else a finding of level ``bad``."""
    return Finding("ok", what) if good else Finding(bad, what, fix)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option that :func:`report` takes as ``as_json``."""
    add_options(parser, ("--json", bool, False, "print a list of findings as JSON", "lines"))


def report(findings: Iterable[Finding], *, as_json: bool = False, strict: bool = False) -> int:
    """Print ``findings`` to stdout, and unless ``as_json`` a last line that sums them up.

    Returns:
        The exit code: 1 if anything failed, or with ``strict`` was warned about; else 0.
    """
    findings = list(findings)
    number = Counter(finding.level for finding in findings)
    code = int(number["FAIL"] > 0 or (strict and number["warn"] > 0))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return code
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)  # nothing is cut or broken: a fix can be copied
    for each in findings:
        fix = f"  -> fix: {each.fix}" if each.fix else ""
        console.print(
            Text.assemble((f"{each.level:<5}", _STYLES[each.level]), f" {each.what}{fix}")
        )
    counts = ", ".join(f"{number[level]} {level}" for level in ("ok", "warn", "FAIL"))
    wrong = "failed or was warned about" if strict else "failed"
    print(f"{counts}; exit code {code}: {'something' if code else 'nothing'} {wrong}")
    return code
