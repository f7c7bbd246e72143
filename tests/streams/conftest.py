"""Options of the tests of streams."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-rules", action="store_true", help="write the table of stream rules anew"
    )
