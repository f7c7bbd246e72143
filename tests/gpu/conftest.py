"""Fixture of the tests on a card: ``on_card``."""

from __future__ import annotations

import typing

import pytest

import one_card

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn


@pytest.fixture
def on_card(spawn: Spawn) -> Spawn:
    """``on_card(fn, world_size, *args)``: what ``fn(*args)`` returned, by rank; all on one card."""

    def call(
        fn: Callable[..., typing.Any],
        world_size: int,
        *args: typing.Any,
        timeout_s: float = one_card.TIMEOUT_S,
    ) -> list[typing.Any]:
        return spawn(one_card.run_on_card, world_size, fn, *args, timeout_s=timeout_s)

    return call
