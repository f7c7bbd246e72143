"""What is said in two places is the same in both."""

from __future__ import annotations

import pathlib
import re

import shardkit

ROOT = pathlib.Path(__file__).parents[2]
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of the table of what was tested."""
    text = (ROOT / page).read_text()
    table = text[text.index("| | state | what ran |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_what_was_tested_is_the_same_on_both_first_pages() -> None:
    readme, index = rows_of("README.md"), rows_of("docs/index.md")
    assert [row[:2] for row in readme] == [row[:2] for row in index]
    for mine, theirs in zip(readme, index, strict=True):
        shared = [part for part in mine[2].split("; ") if "below" not in part]
        assert all(part in LINK.sub(r"\1", theirs[2]) for part in shared)


def test_the_changelog_has_this_version() -> None:
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1].rstrip(",") == shardkit.__version__
