"""The table of tests/README.md names every file of the package and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "lightning_dp"
README = (TESTS / "README.md").read_text()


def wrong(table: str) -> set[str]:
    """Files that are missing from the table, named twice, or not there."""
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", table, re.M)
    named = [name for files, _ in rows for name in re.findall("`(.*?)`", files)]
    tests = {name for _, files in rows for name in re.findall("`(.*?)`", files)}
    files = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")}
    files = {name for name in files if not name.endswith("__init__.py")}
    twice = {name for name in named if named.count(name) > 1}
    return (files ^ set(named)) | twice | {name for name in tests if not (TESTS / name).exists()}


def test_every_file_has_a_row_and_every_test_exists():
    assert wrong(README) == set(), "tests/README.md: correct its table"


def test_control_each_fault_of_the_table_is_seen():
    row = "| `app/parsing.py` | `unit/test_nothing.py` |\n"
    assert wrong(README + row) == {"app/parsing.py", "unit/test_nothing.py"}
    assert wrong(README.replace("`errors.py`", "`mistakes.py`")) == {"errors.py", "mistakes.py"}
