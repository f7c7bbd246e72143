"""Names in the source: one for one thing."""

from __future__ import annotations

import collections
import pathlib
import re

SOURCE = pathlib.Path(__file__).parents[2] / "src"


def test_the_name_of_a_class_stands_once() -> None:
    files = collections.defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            files[name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
