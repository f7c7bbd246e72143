"""Options of the tests of streams, and where they run."""

from __future__ import annotations

import pathlib

import pytest

from shardkit._compat import torch_tensors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-rules", action="store_true", help="write the table of stream rules anew"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the simulation where torch cannot exchange the memory of storages."""
    if torch_tensors.HAS_STORAGE_SWAP:
        return
    here = pathlib.Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            reason = "the simulated device swaps storages, which torch before 2.12 cannot"
            item.add_marker(pytest.mark.skip(reason=reason))
