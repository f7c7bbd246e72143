"""The table of stream rules in ARCHITECTURE.md is what the simulation sees."""

from __future__ import annotations

import typing

import pytest
import stream_rules

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.streams


def test_the_documented_rules_are_what_happens(
    request: pytest.FixtureRequest, spawn: Spawn
) -> None:
    seen, _ = spawn(stream_rules.seen_in_training, 2)
    rules = stream_rules.table(seen)
    if request.config.getoption("--write-rules"):
        stream_rules.write(rules)
    assert stream_rules.written() == rules, "run this test with --write-rules, and read the change"
