"""Entries of docstrings begin with a noun: "Size of each matrix.", not "Of each matrix."."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = pathlib.Path(__file__).parents[2] / "src" / "shardkit"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SECTION = re.compile(r"^(Args|Attributes|Returns):\n((?: {4}.*(?:\n|$)|\n(?= {4}))+)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+): (.*)", re.MULTILINE)

PREPOSITIONS = (
    *("About", "After", "Among", "As", "At", "Before", "Between", "By", "For", "From", "In", "Of"),
    *("On", "Over", "To", "Under", "With", "Without"),
)
PRONOUNS = (
    *("Either", "It", "Its", "Somebody", "Their", "These", "They", "Those"),
    *("What", "When", "Where", "Which", "Who", "Whose", "Why", "How"),
)
OTHERS = (
    *(
        "Also",
        "Called",
        "Each",
        "Empty",
        "Gets",
        "Gives",
        "Has",
        "Holds",
        "Is",
        "Let",
        "Makes",
        "More",
    ),
    *("None", "Nothing", "Only", "Same", "Says", "See", "So", "Takes", "Then", "Told", "True"),
)
WORN = {*PREPOSITIONS, *PRONOUNS, *OTHERS}


def entries_of(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each entry; the name of what is returned is "Returns"."""
    for section, body in SECTION.findall(docstring):
        if section == "Returns":
            yield section, body.strip()
        else:
            yield from ENTRY.findall(body)


def worn_entries(path: pathlib.Path) -> Iterator[str]:
    """Yield line and text of the entries in a file that begin with a worn word."""
    for node in ast.walk(ast.parse(path.read_text())):
        docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        for name, text in entries_of(docstring or ""):
            if re.split(r"\W", text, maxsplit=1)[0] in WORN:
                line = getattr(node, "lineno", 1)
                yield f"{path.relative_to(SOURCE)}:{line}: {name}: {text.splitlines()[0]}"


def test_entries_begin_with_a_noun() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    assert [entry for path in files for entry in worn_entries(path)] == []


@pytest.mark.parametrize(
    ("section", "num_worn"),
    [
        ("Args:\n    nbytes: Of each matrix.\n    name: Name of it.", 1),
        ("Args:\n    nbytes: Size of each\n        Of two lines.\n\n    *more: See it.", 1),
        ("Attributes:\n    is_done: Whether it is.\n    why: The reason.", 0),
        ("Returns:\n    What was found.\n", 1),
        ("Raises:\n    ValueError: Where it is wrong.", 0),
    ],
)
def test_worn_entries_are_found(section: str, num_worn: int) -> None:
    docstring = inspect.cleandoc(f"Do it.\n\n{section}\n\nCost: none.")
    firsts = [re.split(r"\W", text, maxsplit=1)[0] for _, text in entries_of(docstring)]
    assert sum(first in WORN for first in firsts) == num_worn
