"""Every test that docs/modules.md names exists, and every report has a row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


MODULES = (ROOT / "docs/modules.md").read_text()


def _named(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def _defined() -> set[str]:
    files = (ROOT / "tests/multi_process").rglob("test_*.py")
    return {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }


def test_every_named_test_exists():
    assert len(_named(MODULES)) > 60
    assert not _named(MODULES) - _defined()


def test_every_report_has_a_row_and_a_test():
    rows = re.findall(r"^\| ([abc]\d\d) \|", MODULES, re.M)
    numbers = [f"a{n:02}" for n in range(1, 9)] + [f"b{n:02}" for n in range(9, 19)]
    numbers += [f"c{n:02}" for n in range(19, 31)]
    assert rows == numbers
    for number in numbers:
        if number != "c26":
            assert any(name.startswith(f"test_{number}_") for name in _defined()), number


def test_control_a_name_that_does_not_exist_is_seen():
    text = MODULES.replace("`test_a01_", "`test_a99_", 1)
    assert len(_named(text) - _defined()) == 1
