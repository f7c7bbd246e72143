"""Phrases that read as translated do not come back to the documents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from code_blocks import ROOT

if TYPE_CHECKING:
    import pathlib

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/index.md",
    *sorted((ROOT / "docs/guide").glob("*.md")),
    *sorted((ROOT / "docs/howto").glob("*.md")),
    *sorted((ROOT / "docs/design").glob("*.md")),
    *sorted((ROOT / "docs/reference").glob("*.md")),
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
]
NOT_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]+`", re.MULTILINE | re.DOTALL)

WORN = {
    r"\bor newer ones\b": "write 3.11+",
    r"\b(is|are) (said|known) of\b": "say who says or knows it",
    r"\bstands? for\b": "replaces, means",
    r"\belse who\b": "who else, or a noun",
    r"\b(is|are|be|was|were|must be) told\b": "gets an error, knows: name who tells",
    r"\branks that part\b|\bpart from each other\b": "diverge",
    r"\bno fault\b": "you may",
    r"\bhold besides\b|\bthere are besides\b": "also, as well",
    r"\bnothing of this\b": "none of this",
    r"\bof use for\b": "helps with",
    r"\bso (it|they) do(es)? with\b": "also, too",
    r"\brefused is\b": "shardkit refuses",
    r"\bis to be (set|done)\b": "set, do",
    r"\bdifferences to\b": "differences from",
}
"""Patterns of worn phrases, and better ones."""


def worn_phrases(page: str) -> list[str]:
    """Return the worn phrases of a page, each with what to write."""
    prose = re.sub(r"\s+", " ", NOT_PROSE.sub(" ", page))
    return [
        f"{found[0]!r}: {better}"
        for pattern, better in WORN.items()
        for found in re.finditer(pattern, prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_worn_phrase(page: pathlib.Path) -> None:
    assert worn_phrases(page.read_text()) == []


def test_worn_phrases_are_found_across_lines_and_not_in_code() -> None:
    assert worn_phrases("Nothing\nof this has run.") == ["'Nothing of this': none of this"]
    assert worn_phrases("`a stands for b`\n\n```sh\n# is told\n```\n<!-- is told -->\n") == []
