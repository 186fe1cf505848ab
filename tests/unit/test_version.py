"""One version, in three places."""

import re
from pathlib import Path

import lightning_dp

ROOT = Path(__file__).parents[2]


def _first(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match is not None, f"{file} has no line like {pattern}"
    return match[1]


def test_package_and_project_have_one_version():
    assert _first(r'^version = "(.+)"$', "pyproject.toml") == lightning_dp.__version__


def test_newest_entry_of_the_changelog_is_this_version():
    assert _first(r"^## \[(\d.+?)\]", "CHANGELOG.md") == lightning_dp.__version__


def test_changelog_uses_the_sections_of_keep_a_changelog():
    sections = re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert sections
    assert set(sections) <= known
