"""Fixtures of the tests of collectives: which groups travel together."""

from __future__ import annotations

import typing

import pytest

from shardkit import _schedule

if typing.TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _each_group_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups would share collectives, and these are small."""
    monkeypatch.setattr(_schedule, "BATCH_NBYTES", 0)


@pytest.fixture
def batch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``batch_of(nbytes)``: models made from now on send groups of fewer bytes together."""
    return lambda nbytes: monkeypatch.setattr(_schedule, "BATCH_NBYTES", nbytes)
