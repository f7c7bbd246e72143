"""Ends of watchdogs in these tests are no ends of runs."""

from __future__ import annotations

import pytest

from shardkit.backends.watch import watchdog


@pytest.fixture(autouse=True)
def no_comparison_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of these tests are objects of one process, in which others may have pickled pieces."""
    monkeypatch.setattr(watchdog, "at_end", [])
