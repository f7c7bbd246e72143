"""Training on the simulated accelerator: uses are ordered, numbers right, memory fixed."""

from __future__ import annotations

import typing

import pytest
from scenarios import NUM_RANKS, SCENARIOS, complaints

if typing.TYPE_CHECKING:
    from workers import Spawn

OPTIONS = {
    "apart": {"batches": False},
    "older_torch": {"batches": False, "keeps_memory": False},
    "together": {},
    "no_host_engine": {"has_host_engine": False},
}
IN_ALL_WAYS = (
    *("zero3", "mixed_precision", "replicated", "lora", "accumulation"),
    *("unused_parameters", "dropped"),
)
CORE = ("zero3", "mixed_precision", "hybrid", "accumulation", "offload", "recovery", "captured")
"""In the default session; the others in `nox -s streams`."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            name,
            options,
            marks=() if (name in CORE and options == "apart") else pytest.mark.streams,
        )
        for options in OPTIONS
        for name in SCENARIOS
        if options in ("apart", "older_torch") or name in IN_ALL_WAYS
    ],
)
def test_nothing_is_unordered(spawn: Spawn, name: str, options: str) -> None:
    for found in spawn(complaints, NUM_RANKS.get(name, 2), name, OPTIONS[options]):
        assert not found, "\n".join(found)
