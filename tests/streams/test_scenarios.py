"""Training on the simulated accelerator: nothing is unordered, numbers are right, memory is fixed."""

from __future__ import annotations

import typing

import pytest

from scenarios import NUM_RANKS, SCENARIOS, complaints

if typing.TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS = {
    "default": {},
    "apart": {"batches": False},
    "older_torch": {"batches": False, "keeps_memory": False},
    "no_host_engine": {"has_host_engine": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_unordered(spawn: Callable[..., typing.Any], name: str, options: str) -> None:
    for found in spawn(complaints, NUM_RANKS.get(name, 2), name, OPTIONS[options]):
        assert not found, "\n".join(found)
